"""Publishes, verifies, links and deletes checkpoint folders on the local disk. All functions block.

A folder is complete when it has a manifest. A checkpoint is written beside its place and moved there when it
is complete, so a folder under its own name is always whole, and an overwritten one stays until the new one is
there. Each attempt to write one has a place of its own, so that lost workers write where nobody looks.
"""

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from spmd_tx.coordinator.storage.folders import difference, digest
from spmd_tx.coordinator.storage.tables import LOCAL_OWNER
from spmd_tx.coordinator.wire.checkpoint_paths import KINDS, CheckpointPath
from spmd_tx.durable_files import make_folder, put_in_place, sync_tree, unique_beside, write_file
from spmd_tx.errors import UNREADABLE, InvalidRequest
from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.protocol.optimizers import OptimizerName

MANIFEST = "checkpoint.json"
ENCRYPTED = ".age"  # suffix of an encrypted file
UNMERGED, MERGED = "ocdbt.process_", "manifest.ocdbt"  # what Orbax writes per process, and then of all
STAGED = "staged"  # suffix of a folder that is being written
# Raise one when older versions cannot read the files; all earlier formats must stay readable.
FORMATS: Mapping[OptimizerName, int] = {"adamw": 1, "dimuon": 2}
FORMAT = max(FORMATS.values())
STAGED_NAME = re.compile(rf"\.(?P<name>.+)\.[0-9a-f]{{16}}\.{STAGED}|\.(?P<old>.+)\.partial", re.DOTALL)
TRIES = 100  # far more often than a checkpoint can be overwritten while it is linked
PAUSE = 0.02  # seconds between tries: while the names are not exchanged at once, the folder is away

Ignore = Callable[[str, list[str]], set[str]]  # as shutil.copytree takes it


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a checkpoint. Its presence in a folder says that the checkpoint is complete."""

    run_id: str
    base_model: str
    rank: int
    alpha: float
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    optimizer: OptimizerName = "adamw"
    created_at: float  # seconds since the epoch
    expires_at: float | None
    user_metadata: dict[str, Any] | None
    files: dict[str, int]  # sizes in bytes, by path within the folder
    digests: dict[str, str] = {}  # by path; the first checkpoints had none
    saved_by: str | None = None  # id of the request
    owner: str = LOCAL_OWNER
    is_public: bool = False
    is_best: bool = False  # of its run, as people have said
    seq_id: int | None = None  # of the request; None: of no run, or of an earlier version
    copied_from: str | None = None  # tinker:// path
    # The layout of factors of experts (models/declared/model.py), None where there are no experts. The first
    # checkpoints of mixtures have None, too: theirs are per expert.
    expert_lora: str | None = None
    format: int = FORMATS["adamw"]

    @property
    def adapter(self) -> AdapterSpec:
        return msgspec.convert(self, AdapterSpec, from_attributes=True)

    @property
    def version(self) -> str:
        """Identifies this content of the checkpoint among all that had its path."""
        identity = msgspec.json.encode([self.run_id, self.created_at, self.saved_by])
        return blake2b(identity, digest_size=8).hexdigest()

    @property
    def is_encrypted(self) -> bool:
        return any(name.endswith(ENCRYPTED) for name in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(self.files.values())


def prepare(folder: Path) -> Path:
    """Choose a new path beside ``folder`` where its next content can be written.

    Raises InvalidRequest when the file system takes the name for another one, as some do in another case.
    """
    make_folder(folder.parent)
    if not _is_listed(folder) and folder.exists() and not _is_listed(folder):  # twice: it may come and go
        raise InvalidRequest(
            f"{folder.name!r} and another checkpoint of this run have names that the server's file system "
            "cannot tell apart; choose a name that differs in more than its case"
        )
    return unique_beside(folder, STAGED)


def _is_listed(folder: Path) -> bool:
    return folder.name in os.listdir(folder.parent)


def sizes(folder: Path) -> dict[str, int]:
    """The sizes of the files in bytes, by path within the folder."""
    ours = (folder / MANIFEST, folder / f".{MANIFEST}.tmp")
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path not in ours)
    return {str(path.relative_to(folder)): path.stat().st_size for path in paths}


def with_digests(folder: Path, manifest: Manifest) -> Manifest:
    """The manifest with the digests of the folder's files, unless it has digests."""
    digests = manifest.digests or {name: digest(folder / name) for name in manifest.files}
    return msgspec.structs.replace(manifest, digests=digests)


def publish(staged: Path, folder: Path, manifest: Manifest, alone: AbstractContextManager[object]) -> None:
    """Add the manifest to a written checkpoint, and put it in place of an earlier one of that name.

    ``alone`` is entered for the moment of the replacement.
    """
    manifest = with_digests(staged, manifest)
    sync_tree(staged)
    write_file(staged / MANIFEST, msgspec.json.encode(manifest))
    with alone:
        replaced = put_in_place(staged, folder)
    if replaced is not None:
        shutil.rmtree(replaced)


def is_to_be_published(staged: Path, saved_by: str | None) -> bool:
    """Whether the folder still holds what the request has written, not the checkpoint that it replaced."""
    manifest = read_manifest(staged)
    return staged.exists() and (manifest is None or manifest.saved_by == saved_by)


def change_manifest(folder: Path, **values: object) -> None:
    """Replace fields of the manifest. Its file is replaced, too, since other folders may share it."""
    manifest = read_manifest(folder)
    if manifest is not None:
        write_file(folder / MANIFEST, msgspec.json.encode(msgspec.structs.replace(manifest, **values)))


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest; None when there is no complete checkpoint."""
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (FileNotFoundError, NotADirectoryError, *UNREADABLE):
        return None


def read_part(folder: Path, manifest: Manifest, name: str, start: int, size: int) -> bytes:
    """Read a part of a file. Raises OSError when the folder does not hold this version any more."""
    with (folder / name).open("rb") as file:
        now = read_manifest(folder)  # read after opening, so that it is the open file's or a newer one
        content = os.pread(file.fileno(), size, start)
    if now is None or now.version != manifest.version or len(content) != size:
        raise OSError(errno.ESTALE, "the checkpoint was overwritten, or is damaged", str(folder / name))
    return content


def verify(path: CheckpointPath, folder: Path) -> Manifest:
    """Read the manifest, and compare the files with it. Raises InvalidRequest for any difference."""
    manifest = checked(path, read_manifest(folder))
    try:
        problem = difference(folder, manifest.files, manifest.digests)
    except (FileNotFoundError, NotADirectoryError) as error:
        problem = f"{error.filename} is missing"
    if any(name.startswith(UNMERGED) for name in manifest.files) and MERGED not in manifest.files:
        problem = f"{folder / MERGED} was not written, as the name was taken for a pattern"
    if problem is not None:
        raise InvalidRequest(
            f"checkpoint {path} is damaged: {problem}; restore the file or use another checkpoint"
        )
    return manifest


def checked(path: CheckpointPath, manifest: Manifest | None) -> Manifest:
    """The manifest, unless it is missing or of a newer version: then raises InvalidRequest."""
    if manifest is None:
        raise InvalidRequest(
            f"checkpoint {path} is incomplete: it lacks a readable {MANIFEST}; use another one"
        )
    if manifest.format > FORMAT:
        raise InvalidRequest(
            f"checkpoint {path} has format {manifest.format}, of a newer version of the server; this one "
            f"reads formats up to {FORMAT}. Use another checkpoint, or ask the operator to upgrade"
        )
    return manifest


def delete(folder: Path) -> None:
    deleted = unique_beside(folder, "deleted")
    folder.rename(deleted)  # atomic; the rest may be interrupted
    shutil.rmtree(deleted)


def tidy(checkpoints_dir: Path) -> dict[CheckpointPath, Manifest]:
    """Finish or delete what was interrupted, and return the complete checkpoints."""
    for kind in KINDS:
        for staged in checkpoints_dir.glob(f"*/{kind}/.*"):
            name = STAGED_NAME.fullmatch(staged.name)
            if name is not None and read_manifest(staged) is not None:
                folder = staged.with_name(name["old"] or name["name"])
                if not folder.exists():
                    staged.rename(folder)
        for leftover in checkpoints_dir.glob(f"*/{kind}/.*"):
            shutil.rmtree(leftover)
    folders = [folder for kind in KINDS for folder in checkpoints_dir.glob(f"*/{kind}/*")]
    manifests = {folder: read_manifest(folder) for folder in folders}
    return {
        CheckpointPath(manifest.run_id, folder.parent.name, folder.name): manifest
        for folder, manifest in manifests.items()
        if manifest is not None
    }


def link(path: CheckpointPath, folder: Path, place: Path) -> Manifest:
    """Link a complete checkpoint's files into a new folder ``place``, and verify them.

    The result is the manifest of these files: the checkpoint may have been overwritten since it was opened.
    """
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(place, ignore_errors=True)
    _copy(path, folder, partial, lambda *_: set())
    manifest = verify(path, partial)
    partial.rename(place)
    return manifest


def share(path: CheckpointPath, folder: Path, partial: Path) -> Manifest:
    """Link a complete checkpoint's files into a new folder that becomes another checkpoint.

    The result is the manifest of these files, as with ``link``.
    """
    ours = shutil.ignore_patterns(MANIFEST, f".{MANIFEST}.tmp")
    return _copy(path, folder, partial, ours)


def _copy(path: CheckpointPath, folder: Path, partial: Path, ignore: Ignore) -> Manifest:
    """Link or copy the files, and start again if the checkpoint is overwritten meanwhile."""
    for number in range(TRIES):
        time.sleep(PAUSE if number else 0)
        shutil.rmtree(partial, ignore_errors=True)
        before = read_manifest(folder)
        try:
            shutil.copytree(folder, partial, copy_function=_link_or_copy, ignore=ignore)
        except (FileNotFoundError, shutil.Error):
            continue
        after = read_manifest(folder)
        if before is not None and after is not None and before.version == after.version:
            return after
    raise InvalidRequest(f"checkpoint {path} was deleted while it was being opened; use another one")


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # not every file system has links
        shutil.copy2(source, target)
