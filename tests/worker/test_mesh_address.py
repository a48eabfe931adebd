import socket

import pytest

from spmd_tx.worker import mesh_address


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
