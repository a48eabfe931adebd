"""Keeps notes about samples beside their results, to train on them later: a file for each sample request.

Files are found by session and request, so a session does not find another session's notes.
"""

import os
import re
import threading
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import zstandard

from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.runtime.byte_lru import ByteLru
from spmd_tx.durable_files import make_folder, sync
from spmd_tx.errors import UNREADABLE, DamagedBody

ROUTING, STABILITY = "routing", "stability"  # kinds of notes; each has a folder in the data directory
KINDS = (ROUTING, STABILITY)
CACHE_BYTES = 64 << 20
SEQUENCE_ID = re.compile(r"([0-9A-Za-z_-]{1,64}):([0-9]{1,9})")  # request, and number of the sample in it

OF_OWNER = "owner-"  # no session's id begins with it

Holders = Sequence[str]  # whose notes a request may use: its session, its owner's trajectories

Note = TypeVar("Note", bound=msgspec.Struct)


def encode(note: msgspec.Struct) -> bytes:
    """The contents of a note's file."""
    return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(msgspec.msgpack.encode(note))


def folder_of(session_id: str) -> str:
    return session_id.replace(":", "_")


def owner_holder(owner: str) -> str:
    """Return what stands in the place of a session for notes of an owner's trajectories."""
    return f"{OF_OWNER}{blake2b(owner.encode(), digest_size=16).hexdigest()}"


class NoteWriter:
    """Writes notes of all kinds into a data directory. Blocks."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._unsynced: set[Path] = set()  # folders with new names

    def write(self, session_id: str, request_id: str, notes: Mapping[str, bytes]) -> None:
        """Write notes, given as contents by kind. Writing the same again changes nothing."""
        for kind, contents in notes.items():
            path = path_of(self._data_dir / kind, session_id, request_id)
            make_folder(path.parent)
            unfinished = path.with_suffix(".tmp")
            with unfinished.open("wb") as file:
                file.write(contents)
                os.utime(file.fileno(), (now := clock.now(), now))  # the time of the last use
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(path)
            self._unsynced.add(path.parent)

    def finish(self) -> None:
        """Make everything that was written durable, with one sync for all notes of a session."""
        for folder in self._unsynced:
            sync(folder)
        self._unsynced.clear()


class NoteFiles(Generic[Note]):
    """Reads the notes of one kind from their folder. All methods block."""

    def __init__(self, directory: Path, kind: type[Note], what: str, remedy: str) -> None:
        """``what`` a note is and the ``remedy`` for a damaged one are words for error messages."""
        self._directory = directory
        self._kind, self._what, self._remedy = kind, what, remedy
        self._recent: ByteLru[Note] = ByteLru(CACHE_BYTES)
        self._lock = threading.Lock()  # of the recent notes

    def path(self, session_id: str, request_id: str) -> Path:
        return path_of(self._directory, session_id, request_id)

    def read(self, session_id: str, request_id: str) -> Note | None:
        """Read a note; None if this session has no such note.

        Raises DamagedBody when the file is damaged; an OSError may pass.
        """
        path = self.path(session_id, request_id)
        with self._lock:
            note = self._recent.get(str(path))
        if note is None:
            try:
                os.utime(path, (now := clock.now(), now))  # the time of the last use
                plain = zstandard.ZstdDecompressor().decompress(path.read_bytes())
                note = msgspec.msgpack.decode(plain, type=self._kind)
            except FileNotFoundError:
                return None
            except (zstandard.ZstdError, *UNREADABLE) as error:
                raise DamagedBody(
                    f"{path}, which holds {self._what} of a sample, is damaged ({error}); {self._remedy}"
                ) from error
            with self._lock:
                self._recent.put(str(path), note, len(plain))
        return note


def path_of(directory: Path, session_id: str, request_id: str) -> Path:
    return directory / folder_of(session_id) / f"{request_id}.zst"
