"""The addresses at which JAX's service and NCCL listen: only where the processes of the mesh need them.

Neither authenticates its peers, and whoever reaches the service can end the workers.
"""

import logging
import os
import socket
from ipaddress import ip_address

from spmd_tx.protocol import addresses

logger = logging.getLogger(__name__)

NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
NO_PROXY_OF_GRPC = "no_grpc_proxy"  # counts more than no_proxy, and only for gRPC


def free_port() -> int:
    with socket.create_server(("", 0)) as taken:
        return taken.getsockname()[1]


def bind_address(service: str) -> str:
    """Return HOST:PORT at which process 0 listens when the others connect to ``service``.

    That is all addresses of this host if ``service`` is none that it knows as its own.
    """
    host, port = addresses.split(service)
    try:
        family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        own = str(address[0])
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((own, 0))
    except OSError as error:
        logger.warning("JAX listens on all addresses of this host: %s is none of them (%s)", host, error)
        return f"[::]:{port}"
    if ip_address(own).is_loopback and not is_local(service):
        logger.warning("JAX listens on all addresses of this host: %s is a loopback one to itself", host)
        return f"[::]:{port}"
    return addresses.joined(own, port)


def is_local(service: str) -> bool:
    """Say whether the service has a loopback address, so that all processes are on one host."""
    return addresses.is_loopback(addresses.split(service)[0])


def keep_direct(service: str) -> None:
    """Let JAX connect to its service itself, whatever proxies this host's environment names."""
    os.environ[NO_PROXY_OF_GRPC] = addresses.split(service)[0]


def keep_nccl_local() -> None:
    """Restrict NCCL to the loopback interface, unless the operator has chosen others."""
    os.environ.setdefault(NCCL_INTERFACE, "lo")
