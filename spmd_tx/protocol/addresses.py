"""Addresses as HOST:PORT, in which an IPv6 address stands in brackets."""

import re
import socket
from ipaddress import IPv6Address, ip_address

SHAPE = re.compile(r"(?:\[(?P<address>[^\[\]\s]+)\]|(?P<name>[^:/\[\]\s]+)):(?P<port>[0-9]{1,5})")
HIGHEST_PORT = 65_535


def joined(host: str, port: int | str) -> str:
    """Write HOST:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split(address: str) -> tuple[str, int]:
    """Read HOST:PORT; the host is without brackets. Raises ValueError, which says what is wrong."""
    parts = SHAPE.fullmatch(address)
    if parts is None or (parts["address"] and not _is_ipv6(parts["address"])):
        raise ValueError("it must be HOST:PORT")
    port = int(parts["port"])
    if not 0 < port <= HIGHEST_PORT:
        raise ValueError(f"its port must be from 1 to {HIGHEST_PORT}")
    return parts["address"] or parts["name"], port


def free_port(host: str = "127.0.0.1") -> int:
    """Find a port that is free now."""
    with socket.create_server((host, 0)) as taken:
        return taken.getsockname()[1]


def is_loopback(host: str) -> bool:
    """Whether a host, by address or name, can only be this one. Asks no name server."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        name = host.lower().rstrip(".")
        return name == "localhost" or name.endswith(".localhost")


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True
