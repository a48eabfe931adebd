import socket
import threading

import pytest

from spmd_tx.errors import MeshError, StartError
from spmd_tx.worker import mesh_address
from tests.support.ports import free_port


@pytest.fixture
def names(monkeypatch):
    """What names stand for here."""
    names = {}
    real = socket.getaddrinfo

    def getaddrinfo(host, port, **options):
        return real(names.get(host, host), port, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return names


@pytest.mark.parametrize("service", ["127.0.0.1:8471", "localhost:8471"])
def test_processes_of_one_host_listen_on_loopback(service):
    assert mesh_address.is_local(service)
    assert mesh_address.bind_address(service) == "127.0.0.1:8471"


def test_process_0_listens_at_the_address_that_the_others_use(names):
    names["head.cluster"] = own = mesh_address_of_this_host()
    assert not mesh_address.is_local("head.cluster:8471")
    assert mesh_address.bind_address("head.cluster:8471") == f"{own}:8471"


@pytest.mark.parametrize(
    "stands_for, why",
    [
        ("203.0.113.1", "head.cluster is none of them"),
        ("127.0.1.1", "head.cluster is a loopback one to itself"),
    ],
)
def test_it_listens_everywhere_when_it_does_not_know_where(names, caplog, stands_for, why):
    names["head.cluster"] = stands_for
    assert mesh_address.bind_address("head.cluster:8471") == "[::]:8471"
    assert why in caplog.text


def test_an_ipv6_service_listens_in_brackets():
    assert mesh_address.is_local("[::1]:8471")
    assert mesh_address.bind_address("[::1]:8471") == "[::1]:8471"


@pytest.mark.parametrize("service, host", [("node-a:8471", "node-a"), ("[fd00::1]:8471", "fd00::1")])
def test_no_proxy_is_between_the_workers(monkeypatch, service, host):
    monkeypatch.setattr(mesh_address.os, "environ", environment := {"no_grpc_proxy": "others"})
    mesh_address.keep_direct(service)
    assert environment == {"no_grpc_proxy": host}


@pytest.mark.parametrize(
    "stands_for, why", [("127.0.1.1", "stands for 127.0.1.1, where"), ("nobody.invalid", "for no address")]
)
def test_a_host_whose_name_no_other_host_can_use_is_refused(names, monkeypatch, stands_for, why):
    monkeypatch.setattr(socket, "gethostname", lambda: "debian")
    names["debian"] = stands_for
    mesh_address.check_own_name("127.0.0.1:8471")  # all are on this host
    with pytest.raises(StartError, match=f"the name of this host, debian, .*{why}.* /etc/hosts"):
        mesh_address.check_own_name("203.0.113.1:8471")
    names["debian"] = "203.0.113.2"
    mesh_address.check_own_name("203.0.113.1:8471")


def test_process_0_is_waited_for(monkeypatch):
    monkeypatch.setattr(mesh_address, "RETRY_SECONDS", 0.01)
    port = free_port()
    waiting = threading.Thread(target=mesh_address.await_service, args=(f"127.0.0.1:{port}",))
    waiting.start()
    with socket.create_server(("127.0.0.1", port)) as service:
        service.accept()[0].close()
    waiting.join(timeout=30)
    assert not waiting.is_alive()


def test_a_process_0_that_cannot_be_reached_is_named_with_the_remedy(monkeypatch, caplog):
    monkeypatch.setattr(mesh_address, "JOIN_SECONDS", 0.05)
    monkeypatch.setattr(mesh_address, "TELL_SECONDS", 0.01)
    monkeypatch.setattr(mesh_address, "RETRY_SECONDS", 0.02)
    service = f"127.0.0.1:{free_port()}"
    with pytest.raises(
        MeshError, match=f"cannot reach worker 0 at {service} .*Connection refused.*--jax-port"
    ):
        mesh_address.await_service(service)
    assert f"cannot reach worker 0 at {service} yet: Connection refused" in caplog.text


def test_the_operator_chooses_the_interface_of_nccl(monkeypatch):
    monkeypatch.delenv(mesh_address.NCCL_INTERFACE, raising=False)
    monkeypatch.setattr(mesh_address.os, "environ", environment := {})
    mesh_address.keep_nccl_local()
    assert environment == {mesh_address.NCCL_INTERFACE: "lo"}
    environment[mesh_address.NCCL_INTERFACE] = "eth0"
    mesh_address.keep_nccl_local()
    assert environment == {mesh_address.NCCL_INTERFACE: "eth0"}


def mesh_address_of_this_host():
    """One that is not a loopback address, if there is any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 1))
        except OSError:
            pytest.skip("this host has a loopback address only")
        return probe.getsockname()[0]
