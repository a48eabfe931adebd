"""Addresses under which one file of a checkpoint can be fetched without an API key, for a while.

The signature covers what the file is, of which saved version of which owner's checkpoint, and until when;
the key that it is made with never leaves the data directory.
"""

import hmac
import os
import re
import secrets
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlencode

import msgspec

from spmd_tx.coordinator.checkpoint_files import CheckpointPath, Manifest
from spmd_tx.errors import Forbidden, StartError

LIFETIME_SECONDS = 3600
KEY_FILE = "url_key"
KEY_BYTES = 32

HOST = re.compile(r"[A-Za-z0-9._~-]+(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](:[0-9]{1,5})?")
PREFIX = re.compile(r"(/[A-Za-z0-9._~-]+)*/?")

NOT_VALID = (
    "this download link is not valid: it was altered or cut, or the checkpoint was deleted or overwritten; "
    "ask for a new one"
)


class File(NamedTuple):
    """A file of one saved version of a checkpoint."""

    path: CheckpointPath
    name: str  # path within the checkpoint; "" is all of it, as a tar archive
    manifest: Manifest


class UrlSigner:
    """Of one server."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def query(self, file: File, expires: int) -> str:
        """What makes an address valid until ``expires``, in seconds since the epoch."""
        return urlencode({"expires": expires, "signature": self._signature(file, expires)})

    def check(self, file: File | None, expires: int, signature: str, now: float) -> File:
        """Raises Forbidden; what does not exist is answered like what was not signed."""
        expected = "" if file is None else self._signature(file, expires)
        if file is None or not hmac.compare_digest(signature.encode(), expected.encode()):
            raise Forbidden(NOT_VALID)
        if expires <= now:
            raise Forbidden("this download link has expired; ask for a new one")
        return file

    def _signature(self, file: File, expires: int) -> str:
        manifest = file.manifest
        told = [*file.path, file.name, manifest.owner, manifest.created_at, manifest.saved_by, expires]
        return hmac.new(self._key, msgspec.json.encode(told), sha256).hexdigest()


def open_signer(data_dir: Path) -> UrlSigner:
    """With the key in the data directory, which is made when there is none. Blocks. Raises StartError."""
    file = data_dir / KEY_FILE
    try:
        if not file.exists():
            unfinished = data_dir / f".{KEY_FILE}.tmp"
            unfinished.unlink(missing_ok=True)
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as opened:
                opened.write(secrets.token_bytes(KEY_BYTES))
                opened.flush()
                os.fsync(descriptor)
            unfinished.rename(file)
        key = file.read_bytes()
    except OSError as error:
        raise StartError(f"cannot read or make {file}: {error.strerror}") from error
    if len(key) != KEY_BYTES:
        raise StartError(f"{file} has {len(key)} bytes instead of {KEY_BYTES}; delete it: a new one is made")
    return UrlSigner(key)


def base_url(scheme: str, headers: Mapping[str, str], root_path: str = "") -> str:
    """This server's address as the client sees it, which a proxy says in X-Forwarded-Proto, -Host, -Prefix.

    A client can say so, too, and then gets links that lead where it wants; nobody else gets them.
    """
    forwarded = {
        name: headers.get(f"x-forwarded-{name}", "").partition(",")[0].strip()
        for name in ("proto", "host", "prefix")
    }
    if forwarded["proto"] in ("http", "https"):
        scheme = forwarded["proto"]
    hosts = (forwarded["host"], headers.get("host", ""))
    host = next((host for host in hosts if HOST.fullmatch(host)), "localhost")
    prefix = forwarded["prefix"] if PREFIX.fullmatch(forwarded["prefix"]) else ""
    return f"{scheme}://{host}{(prefix or root_path).rstrip('/')}"


def quoted(path: CheckpointPath, name: str) -> str:
    """A file's part of the address."""
    return "/".join(quote(part, safe=":") for part in [*path, *name.split("/")])
