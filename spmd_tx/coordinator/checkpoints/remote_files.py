"""Reads and writes files under a base URL with fsspec. Only this module knows its file systems' errors."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from spmd_tx.errors import StartError

LOCAL = ("file", "local")
OWNER = "spmd-tx-server"  # a file with the id of the server that owns the base

# Errors of the libraries behind file systems that are no OSErrors. The operator must mend the first kind.
REFUSALS = ("botocore.exceptions.NoCredentialsError", "google.auth.exceptions.DefaultCredentialsError")
FAILURES = (
    "botocore.exceptions.BotoCoreError",
    "botocore.exceptions.ClientError",
    "aiohttp.ClientError",
    "gcsfs.retry.HttpError",
    "google.auth.exceptions.GoogleAuthError",
)


class RemoteFiles:
    """Accesses the files under a base URL.

    Methods raise FileNotFoundError, PermissionError, and ConnectionError for anything that may work later.
    """

    def __init__(self, url: str, option: str = "--checkpoints-base") -> None:
        """Raises StartError, which names the ``option``, when there is no such file system."""
        self.url = url
        protocol = url.partition("://")[0]
        self._is_local = protocol in LOCAL
        options: dict[str, Any] = {"auto_mkdir": True} if self._is_local else {"use_listings_cache": False}
        if protocol == "memory":
            raise StartError(f"{option} memory:// would lose everything; name a permanent place")
        try:
            self._system, root = url_to_fs(url, **options)
        except ImportError as error:
            raise StartError(
                f"{option} {url} needs another package ({error}); pip install 'spmd_tx[s3]' or 'spmd_tx[gcs]'"
            ) from error
        except (ValueError, OSError) as error:
            supported = "a directory, or a URL as s3://bucket/path or gs://bucket/path"
            raise StartError(f"{option} {url} cannot be used: {error}; name {supported}") from error
        self._root = root.rstrip("/")
        if not (self._root or self._is_local):
            raise StartError(f"{option} {url} names no bucket; name one, as in s3://bucket/path")
        self._refusals, self._failures = _existing(REFUSALS), _existing(FAILURES)

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        with self._errors():
            return self._system.cat_file(self._place(name), start=start, end=end)

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically."""
        with self._errors():
            if not self._is_local:  # object stores show whole objects only
                self._system.pipe_file(self._place(name), content)
                return
            unfinished = self._place(f"{name}.{secrets.token_hex(4)}.tmp")
            self._system.pipe_file(unfinished, content)
            self._system.mv(unfinished, self._place(name))

    def upload(self, source: Path, name: str) -> None:
        with self._errors():
            self._system.put_file(str(source), self._place(name))

    def download(self, name: str, target: Path) -> None:
        with self._errors():
            self._system.get_file(self._place(name), str(target))

    def delete(self, name: str) -> None:
        with self._errors():
            self._system.rm_file(self._place(name))

    def folders(self) -> list[str]:
        """The names of the folders that are in no other; none if nothing has been written yet."""
        with self._errors():
            self._system.invalidate_cache()
            try:
                entries = self._system.ls(self._root, detail=True)
            except FileNotFoundError:
                return []
        return [
            entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"
        ]

    def sizes(self, folder: str = "") -> dict[str, int]:
        """The sizes in bytes of all files in a folder and its subfolders, by name; {} if there is none."""
        with self._errors():
            self._system.invalidate_cache()
            entries = self._system.find(self._place(folder) if folder else self._root, detail=True)
        sizes = {str(path).removeprefix(f"{self._root}/"): each["size"] for path, each in entries.items()}
        # Of a folder that is not there, some file systems list what begins with its name.
        return {name: sizes[name] for name in sorted(sizes) if not folder or name.startswith(f"{folder}/")}

    def own(self, server_id: str) -> None:
        """Claim the base for a server. Raises StartError if that is impossible, or ConnectionError."""
        try:
            owner = self._owner(server_id)
        except (FileNotFoundError, PermissionError) as error:
            raise StartError(f"--checkpoints-base {self.url} cannot be written: {error}") from error
        if owner != server_id:
            raise StartError(
                f"--checkpoints-base {self.url} belongs to a server with another data directory; name "
                f"another place, or, if that server no longer exists, delete {OWNER} there"
            )

    def _owner(self, server_id: str) -> str:
        try:
            return self.read(OWNER).decode()
        except FileNotFoundError:
            self.write(OWNER, server_id.encode())
            return self.read(OWNER).decode()

    def _place(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        if self._is_local:
            yield
            return
        try:
            yield
        except (FileNotFoundError, PermissionError):
            raise
        except NotImplementedError as error:
            raise PermissionError(f"{self.url} is of a kind that cannot be listed, or written") from error
        except self._refusals as error:
            raise PermissionError(f"{self.url}: {error}") from error
        except (OSError, *self._failures) as error:
            raise ConnectionError(f"{self.url} does not answer: {error}") from error


def _existing(names: tuple[str, ...]) -> tuple[type[Exception], ...]:
    """The classes with these names whose packages are installed."""
    exceptions = []
    for name in names:
        module, _, error = name.rpartition(".")
        try:
            exceptions.append(getattr(import_module(module), error))
        except ImportError:
            continue
    return tuple(exceptions)
