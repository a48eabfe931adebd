"""Where JAX's own service listens, and NCCL: nowhere but where the processes of the mesh need them.

Neither asks who is there. Whoever reaches the service can end the workers.
"""

import logging
import os
import socket
from ipaddress import ip_address

logger = logging.getLogger(__name__)

NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"


def free_port() -> int:
    with socket.create_server(("", 0)) as taken:
        return taken.getsockname()[1]


def bind_address(service: str) -> str:
    """The address at which process 0 listens, HOST:PORT, when the others find it at ``service``.

    All addresses of this host, if it does not know which of them the others mean.
    """
    host, _, port = service.rpartition(":")
    try:
        family, *_, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
        own = str(address[0])
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((own, 0))
    except OSError as error:
        logger.warning("JAX listens at all addresses of this host: %s is none of them (%s)", host, error)
        return f"[::]:{port}"
    if ip_address(own).is_loopback and not is_local(service):
        logger.warning("JAX listens at all addresses of this host: %s is a loopback one to itself", host)
        return f"[::]:{port}"
    return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"


def is_local(service: str) -> bool:
    """Whether all processes are on one host, so that they find the service at a loopback address."""
    host = service.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def keep_nccl_local() -> None:
    """Let NCCL use the loopback interface only, unless the operator has chosen others."""
    os.environ.setdefault(NCCL_INTERFACE, "lo")
