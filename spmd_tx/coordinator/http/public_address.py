"""The server's address as its clients see it, perhaps behind a reverse proxy."""

import re
from functools import cache
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from litestar import Request

from spmd_tx.errors import StartError

HOST = re.compile(r"[A-Za-z0-9._~-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")
PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)*/?")


def base_url(request: Request, trusted_proxies: str) -> str:
    """Return the base URL, with X-Forwarded-Proto, -Host and -Prefix if they come from a trusted proxy."""
    is_trusted = request.client is not None and _is_in(request.client.host, networks(trusted_proxies))
    scheme, host, prefix = (
        _forwarded(request, name) if is_trusted else "" for name in ("proto", "host", "prefix")
    )
    if scheme not in ("http", "https"):
        scheme = request.scope["scheme"]
    hosts = [host, request.headers.get("host", "")]
    host = next((host for host in hosts if HOST.fullmatch(host)), "localhost")
    if not PREFIX.fullmatch(prefix):
        prefix = ""
    return f"{scheme}://{host}{(prefix or request.scope.get('root_path', '')).rstrip('/')}"


@cache
def networks(trusted_proxies: str) -> tuple[IPv4Network | IPv6Network, ...]:
    """Parse addresses and networks that are separated by commas. Raises StartError."""
    try:
        return tuple(ip_network(each.strip()) for each in trusted_proxies.split(",") if each.strip())
    except ValueError as error:
        raise StartError(
            f"--trusted-proxies is {trusted_proxies!r}: {error}; name addresses or networks, as "
            "127.0.0.1,10.0.0.0/8"
        ) from None


def _is_in(address: str, networks: tuple[IPv4Network | IPv6Network, ...]) -> bool:
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None) or parsed
    return any(mapped in network for network in networks)


def _forwarded(request: Request, name: str) -> str:
    """Return the outermost proxy's value of a header."""
    return request.headers.get(f"x-forwarded-{name}", "").partition(",")[0].strip()
