"""Keeps web pages from using a server without API keys through the operator's browser.

A page can reach a server that listens on loopback only. With a name of its own that resolves to 127.0.0.1
(DNS rebinding) it could even read the answers, so the server answers only to names that no page can have.
With keys this is not needed: a page has none.
"""

import re
import socket
from functools import lru_cache
from ipaddress import ip_address

from litestar.datastructures import Headers

from spmd_tx.config import ServerConfig
from spmd_tx.errors import Forbidden, UnsupportedBody
from spmd_tx.protocol.addresses import is_loopback

# Types that a page may send to other sites without a CORS preflight.
FORMS = ("text/plain", "multipart/form-data", "application/x-www-form-urlencoded")
PORT = re.compile(r":[0-9]*$")


def keep_out(headers: Headers, config: ServerConfig, *, is_signed_file: bool = False) -> None:
    """Raise Forbidden for another site's name or page, and UnsupportedBody for what forms send.

    A file may have any type where the URL is signed, which no page can know.
    """
    host, origin = headers.get("host", ""), headers.get("origin")
    if not _is_own(host, config.host):
        raise Forbidden(
            f"this server has no API keys, so it does not answer as {host!r}: use localhost or an "
            "address, start it with this name as --host, or create a key with: spmd-tx keys create"
        )
    if origin is not None and not _is_own(origin.partition("://")[2], config.host):
        raise Forbidden(f"this server has no API keys, and takes no requests from pages of {origin!r}")
    if is_signed_file:
        return
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in FORMS or (not kind and origin is not None and headers.get("content-length", "0") != "0"):
        raise UnsupportedBody(
            f"Content-Type is {kind!r}; send application/json, or protobuf where it is taken"
        )


@lru_cache(256)
def _is_own(host: str, own_host: str) -> bool:
    """Return whether ``host`` names this server, which listens on ``own_host``."""
    name = PORT.sub("", host).strip("[]").lower().removesuffix(".")
    try:
        address = ip_address(name)
    except ValueError:
        is_named = not is_loopback(own_host) and name == socket.gethostname().lower()
        return is_named or name in ("localhost", own_host.lower())
    return address.is_loopback or not is_loopback(own_host)
