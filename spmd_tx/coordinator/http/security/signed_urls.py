"""Signed URLs, which let their holder read one thing for a while without an API key.

The signature (HMAC-SHA256) covers the path, the time of expiry, the owner and the API key that made the URL.
A route with the mark SIGNED (authentication.py) gets a caller who sees what the owner sees and may only read,
as long as that key is valid. The route must check that the thing still exists and is the owner's.
"""

import hmac
import os
import secrets
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from urllib.parse import quote, urlencode

from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.durable_files import sync
from spmd_tx.errors import Forbidden, StartError

SECRET_FILE = "url_secret"  # in the data directory
SECRET_BYTES = 32
LIFETIME_SECONDS = 3600.0


class SignedUrls:
    """Signs and checks URLs. They outlive a restart, as the secret is kept."""

    def __init__(self, secret: bytes, clock: Callable[[], float] = time.time) -> None:
        self._secret = secret
        self._clock = clock

    def sign(
        self, base: str, path: str, owner: str, key_id: str | None, expires_at: float | None = None
    ) -> str:
        """Sign an unquoted path and return its URL at a base URL.

        ``key_id`` is the API key of the request; None on a server without keys. ``expires_at`` is in seconds
        since the epoch; None: LIFETIME_SECONDS from now.
        """
        expires = str(int(self._clock() + LIFETIME_SECONDS if expires_at is None else expires_at))
        key = key_id or ""
        query = {"expires": expires, "owner": owner, "key": key}
        query["signature"] = self._signature(path, *query.values())
        return f"{base.rstrip('/')}{quote(path)}?{urlencode(query)}"

    def caller(self, path: str, query: Mapping[str, str]) -> Caller:
        """Return the caller that a URL was signed for. Raises Forbidden for a bad or expired signature."""
        expires, owner, key = (query.get(name, "") for name in ("expires", "owner", "key"))
        expected = self._signature(path, expires, owner, key)
        if not hmac.compare_digest(expected.encode(), query.get("signature", "").encode()):
            raise Forbidden("the signature does not fit this URL; use the whole URL as the server gave it")
        if float(expires) <= self._clock():
            raise Forbidden("this URL has expired; ask the server for a new one")
        return Caller(owner, "read-only", key or None)

    def _signature(self, *parts: str) -> str:
        text = "\n".join(map(quote, parts))  # so that no part runs into the next
        return hmac.new(self._secret, text.encode(), sha256).hexdigest()


def open_secret(data_dir: Path) -> bytes:
    """Read the secret of a data directory, or make one. Blocks. Raises StartError."""
    path = data_dir / SECRET_FILE
    if not path.exists():
        unfinished = path.with_suffix(".tmp")
        unfinished.unlink(missing_ok=True)
        with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            os.fsync(file.fileno())
        unfinished.replace(path)
        sync(data_dir)
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise StartError(f"{path} has {len(secret)} bytes instead of {SECRET_BYTES}; delete it for a new one")
    return secret
