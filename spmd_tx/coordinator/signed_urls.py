"""URLs that let whoever has them read one thing for a while, without an API key.

The signature (HMAC-SHA256) covers the path, the time of expiry and the owner. A route with the mark SIGNED
gets a caller who sees what the owner sees, and may only read (authentication.py); that the thing still
exists, and is the owner's, is for the route to find out.
"""

import hmac
import os
import secrets
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote, urlencode

from litestar import Request

from spmd_tx.coordinator.callers import Caller
from spmd_tx.errors import Forbidden

SECRET_FILE = "url_secret"  # in the data directory
SECRET_BYTES = 32
LIFETIME_SECONDS = 3600.0


class SignedUrls:
    """Signs and checks. URLs outlive a restart, as the secret is kept."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        self._secret = secret
        self._clock = clock

    def sign(self, base: str, path: str, owner: str, lifetime: float = LIFETIME_SECONDS) -> str:
        """The URL of a path, not yet quoted, at a server's base URL; good for ``lifetime`` seconds."""
        expires = str(int(self._clock() + lifetime))
        query = {"expires": expires, "owner": owner, "signature": self._signature(path, expires, owner)}
        return f"{base.rstrip('/')}{quote(path)}?{urlencode(query)}"

    def caller(self, path: str, query: Mapping[str, str]) -> Caller:
        """Who has signed. Raises Forbidden when nobody has, or when it was too long ago."""
        expires, owner = query.get("expires", ""), query.get("owner", "")
        expected = self._signature(path, expires, owner)
        if not hmac.compare_digest(expected.encode(), query.get("signature", "").encode()):
            raise Forbidden("the signature does not fit this URL; use the whole URL as the server gave it")
        if float(expires) <= self._clock():
            raise Forbidden("this URL has expired; ask the server for a new one")
        return Caller(owner, "read-only")

    def _signature(self, path: str, expires: str, owner: str) -> str:
        text = "\n".join((quote(path), quote(expires), quote(owner)))  # so that no part runs into the next
        return hmac.new(self._secret, text.encode(), sha256).hexdigest()


def base_url(request: Request) -> str:
    """The server's address as the client has it, without the path."""
    return str(request.base_url).rstrip("/")


def open_signed_urls(data_dir: Path) -> SignedUrls:
    """With the secret of a data directory, which is made when there is none. Blocks."""
    path = data_dir / SECRET_FILE
    if not path.exists():
        unfinished = path.with_suffix(".tmp")
        unfinished.unlink(missing_ok=True)
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            os.fsync(file.fileno())
        unfinished.replace(path)
    return SignedUrls(path.read_bytes())
