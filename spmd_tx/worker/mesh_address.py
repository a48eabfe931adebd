"""The addresses at which JAX's service, NCCL and Gloo listen: only where the processes of the mesh need them.

Neither authenticates its peers, and whoever reaches the service can end the workers.
"""

import logging
import os
import socket
import time
from ipaddress import ip_address

from spmd_tx.errors import MeshError, StartError
from spmd_tx.protocol import addresses

logger = logging.getLogger(__name__)

NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
NO_PROXY_OF_GRPC = "no_grpc_proxy"  # counts more than no_proxy, and only for gRPC

JOIN_SECONDS = 120.0  # for process 0 to listen; it may have more to do before
CONNECT_SECONDS = 3.0  # for one attempt
TELL_SECONDS = 10.0  # between lines about it
RETRY_SECONDS = 0.2


def bind_address(service: str) -> str:
    """Return HOST:PORT at which process 0 listens when the others connect to ``service``.

    That is all addresses of this host if ``service`` is none that it knows as its own.
    """
    host, port = addresses.split(service)
    try:
        family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        ip = str(address[0])
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((ip, 0))
    except OSError as error:
        logger.warning("JAX listens on all addresses of this host: %s is none of them (%s)", host, error)
        return f"[::]:{port}"
    if ip_address(ip).is_loopback and not is_local(service):
        logger.warning("JAX listens on all addresses of this host: %s is a loopback one to itself", host)
        return f"[::]:{port}"
    return addresses.joined(ip, port)


def is_local(service: str) -> bool:
    """Say whether the service has a loopback address, so that all processes are on one host."""
    return addresses.is_loopback(addresses.split(service)[0])


def check_own_name(service: str) -> None:
    """Raise StartError if Gloo would listen where processes on other hosts cannot reach it.

    It listens at the address that the name of the host stands for; Debian lets that be 127.0.1.1.
    """
    if is_local(service):
        return
    name = socket.gethostname()
    try:
        ip = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        ip, problem = "", f"stands for no address ({error.strerror or error})"
    else:
        problem = f"stands for {ip}, where other hosts cannot reach its worker"
    if not ip or ip_address(ip).is_loopback:
        raise StartError(
            f"the name of this host, {name}, {problem}; let it stand for the host's address in the network, "
            "as by a line in /etc/hosts"
        )


def await_service(service: str) -> None:
    """Return when process 0 listens. Raises MeshError, which says why it cannot be reached."""
    began = reported = time.monotonic()
    while True:
        try:
            socket.create_connection(addresses.split(service), CONNECT_SECONDS).close()
            return
        except OSError as error:
            problem = error.strerror or str(error)
        now = time.monotonic()
        if now - began >= JOIN_SECONDS:
            raise MeshError(
                f"{socket.gethostname()} cannot reach worker 0 at {service} ({problem}) for {JOIN_SECONDS:g} "
                "s; let a firewall pass connections between the hosts of workers (--jax-port fixes this port)"
            )
        if now - reported >= TELL_SECONDS:
            reported = now
            logger.warning("cannot reach worker 0 at %s yet: %s", service, problem)
        time.sleep(RETRY_SECONDS)


def keep_direct(service: str) -> None:
    """Let JAX connect to its service itself, whatever proxies this host's environment names."""
    os.environ[NO_PROXY_OF_GRPC] = addresses.split(service)[0]


def keep_nccl_local() -> None:
    """Restrict NCCL to the loopback interface, unless the operator has chosen others."""
    os.environ.setdefault(NCCL_INTERFACE, "lo")
