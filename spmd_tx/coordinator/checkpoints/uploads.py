"""The files that clients upload, until they become a checkpoint. All functions block.

An upload has a folder, UPLOADS/ID, with its description and the files that have arrived. A file has its name
once it is whole; until then it is a part, which a client can continue after an interruption or a restart.
"""

import os
import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from spmd_tx.coordinator.storage.disk import modified_at
from spmd_tx.durable_files import make_folder, sync, write_file
from spmd_tx.errors import UNREADABLE, BodyTooLarge, InvalidRequest, NotFound
from spmd_tx.protocol.commands import AdapterSpec

FOLDER = "uploads"  # in the data directory
DESCRIPTION = "upload.json"
REFUSED = "refused"  # in the folder of an upload whose files cannot become a checkpoint
LIFETIME_SECONDS = 6 * 3600.0
OVERTIME_SECONDS = 3600.0  # after the end of its life, for what is still being sent or checked


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """Describes an upload that was begun."""

    id: str  # a UUID
    owner: str
    base_model: str  # as it was asked for
    adapter: AdapterSpec  # as announced; the files say its alpha
    project_id: str | None
    expires_at: float  # seconds since the epoch
    most_bytes: dict[str, int]  # by file


class UploadedPart(NamedTuple):
    """Says how much of a file has arrived."""

    size: int  # bytes
    is_whole: bool


class Uploads:
    """Keeps the uploads of one data directory."""

    def __init__(self, data_dir: Path, most_open: int) -> None:
        """``most_open`` bounds the uploads of one owner that are not finished."""
        self._directory = data_dir / FOLDER
        self._most_open = most_open

    def begin(
        self,
        owner: str,
        base_model: str,
        adapter: AdapterSpec,
        project_id: str | None,
        most_bytes: dict[str, int],
    ) -> Upload:
        """Make the folder. Raises InvalidRequest when the owner has too many open uploads."""
        self._make_room(owner)
        upload = Upload(
            id=str(uuid.uuid4()),
            owner=owner,
            base_model=base_model,
            adapter=adapter,
            project_id=project_id,
            expires_at=float(int(time.time() + LIFETIME_SECONDS)),
            most_bytes=most_bytes,
        )
        make_folder(self.folder(upload.id))
        write_file(self.folder(upload.id) / DESCRIPTION, msgspec.json.encode(upload))
        return upload

    def _make_room(self, owner: str) -> None:
        """Forget refused uploads of an owner, if need be. Raises InvalidRequest if there are not enough."""
        uploads = (upload for upload in map(_read, _folders(self._directory)) if upload is not None)
        is_open = [each for each in uploads if each.owner == owner and each.expires_at > time.time()]
        refused = [each for each in is_open if (self.folder(each.id) / REFUSED).exists()]
        surplus = len(is_open) + 1 - self._most_open
        if surplus > len(refused):
            raise InvalidRequest(
                f"{owner!r} has {len(is_open)} unfinished uploads, the most that one owner may have; finish "
                "them, wait until they expire, or ask the operator to raise the limit open_uploads"
            )
        for upload in sorted(refused, key=lambda each: each.expires_at)[: max(surplus, 0)]:
            self.forget(upload)

    def find(self, id: str) -> Upload:
        """Return an upload that can go on. Raises NotFound for an unknown, expired or finished one."""
        upload = _read(self.folder(id)) if _is_uuid(id) else None
        if upload is None or upload.expires_at <= time.time():
            raise NotFound(f"upload {id!r} does not exist, or has expired; start a new one")
        return upload

    def folder(self, id: str) -> Path:
        return self._directory / id

    def part(self, upload: Upload, name: str) -> UploadedPart:
        """Say how much of a file has arrived. Raises NotFound for a file that the upload does not have."""
        if name not in upload.most_bytes:
            raise NotFound(f"upload {upload.id} has no file {name!r}; it has {', '.join(upload.most_bytes)}")
        whole = self.folder(upload.id) / name
        for path, is_whole in ((_part(whole), False), (whole, True)):
            if path.exists():
                return UploadedPart(path.stat().st_size, is_whole)
        return UploadedPart(0, False)

    def open(self, upload: Upload, name: str, start: int) -> BinaryIO:
        """Open a file to write it from byte ``start`` on, which must not be beyond what has arrived."""
        path = _part(self.folder(upload.id) / name)
        path.touch()
        path.with_name(REFUSED).unlink(missing_ok=True)
        file = path.open("r+b")
        file.truncate(start)
        file.seek(start)
        return file

    def write(self, upload: Upload, name: str, file: BinaryIO, piece: bytes) -> None:
        """Raises BodyTooLarge beyond the bytes that the file can have."""
        check_size(upload, name, file.tell() + len(piece))
        file.write(piece)

    def complete(self, upload: Upload, name: str) -> None:
        """Give a whole file its name. Readers of an earlier one keep what they have opened."""
        whole = self.folder(upload.id) / name
        sync(_part(whole))
        os.replace(_part(whole), whole)

    def check_whole(self, upload: Upload) -> None:
        """Raise InvalidRequest unless all files have arrived."""
        parts = {name: self.part(upload, name) for name in upload.most_bytes}
        missing = [f"{name} ({part.size} bytes so far)" for name, part in parts.items() if not part.is_whole]
        if missing:
            raise InvalidRequest(
                f"upload {upload.id} is incomplete: {', '.join(missing)}; send these to their URLs first"
            )

    def note_refusal(self, upload: Upload) -> None:
        """Let a later upload of the owner take the place of this one, unless files are sent again."""
        with suppress(FileNotFoundError):
            (self.folder(upload.id) / REFUSED).touch()

    def forget(self, upload: Upload) -> None:
        shutil.rmtree(self.folder(upload.id), ignore_errors=True)


def check_size(upload: Upload, name: str, size: int) -> None:
    """Raise BodyTooLarge for a file of this size."""
    most = upload.most_bytes[name]
    if size > most:
        raise BodyTooLarge(
            f"{name} has at least {size} bytes, and for an adapter of rank {upload.adapter.rank} of this "
            f"model it has at most {most}"
        )


def expired(data_dir: Path, now: float) -> list[Path]:
    """List the folders of uploads that were not finished in time, or whose beginning was interrupted."""
    folders = []
    for folder in _folders(data_dir / FOLDER):
        upload = _read(folder)
        ends_at = upload.expires_at if upload is not None else modified_at(folder) + LIFETIME_SECONDS
        if ends_at + OVERTIME_SECONDS <= now:
            folders.append(folder)
    return folders


def folders(data_dir: Path) -> dict[str, Path]:
    """Return the folders of all uploads, by their ids."""
    return {folder.name: folder for folder in _folders(data_dir / FOLDER) if _is_uuid(folder.name)}


def _folders(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.exists() else []


def _read(folder: Path) -> Upload | None:
    try:
        return msgspec.json.decode((folder / DESCRIPTION).read_bytes(), type=Upload)
    except (FileNotFoundError, NotADirectoryError, *UNREADABLE):
        return None


def _part(whole: Path) -> Path:
    return whole.with_name(f".{whole.name}.part")


def _is_uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False
