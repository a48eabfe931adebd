"""``spmd-tx backup``: copies a data directory with its SQLite database, even of a running server. Blocks."""

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from spmd_tx.coordinator.storage.folders import MANIFEST, is_intact
from spmd_tx.errors import StartError
from spmd_tx.group_names import GROUPS_FOLDER

DATABASE = "spmd_tx.db"
FOLDERS = ("payloads", "snapshots", "checkpoints", "versions", "routing", "stability", "kernel_choices")
OF_GROUPS = ("mesh.json", "sampling_mesh.json", "program_uses.json")  # of each group
# Names and layouts of base models, in the forms of all versions, and the mesh: for equal bits it must stay
FILES = ("bases.json", "base_model.json", "expert_lora", *OF_GROUPS)
UNFINISHED = (".staged", ".partial", ".deleted", ".tmp", "lock")


def back_up(data_dir: Path, destination: Path) -> int:
    """Copy what a restart needs; return its size in bytes. Raises StartError when that is impossible.

    Files never change once they have their name, but payload files may grow. They are copied before the
    database, since some may be deleted soon, and after it, since it may refer to new ones.
    """
    if not os.path.isfile(data_dir / DATABASE):
        raise StartError(
            f"{data_dir} holds no {DATABASE}; name a server's --data-dir. With PostgreSQL, stop the server, "
            "run pg_dump, and copy the data directory (docs/backup.md)"
        )
    try:
        if os.path.exists(destination) and any(destination.iterdir()):
            raise StartError(f"{destination} is not empty; name another folder")
        destination.mkdir(parents=True, exist_ok=True)
        size = _copy_files(data_dir, destination)
        _copy_database(data_dir / DATABASE, destination / DATABASE)
        size += _copy_files(data_dir, destination)
        _check(destination)
    except OSError as error:
        raise StartError(f"cannot write the backup to {destination}: {error}; name another folder") from error
    return size + (destination / DATABASE).stat().st_size


def _copy_files(data_dir: Path, destination: Path) -> int:
    """Copy the files that are new or have grown; return their size in bytes."""
    size = 0
    for source in _files(data_dir):
        target = destination / source.relative_to(data_dir)
        if target.exists() and target.stat().st_size == source.stat().st_size:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            size += Path(shutil.copy2(source, target)).stat().st_size
        except FileNotFoundError:  # deleted meanwhile: nobody needs it any more
            continue
    return size


def _files(data_dir: Path) -> Iterator[Path]:
    """List all complete files."""
    yield from (data_dir / name for name in FILES if (data_dir / name).is_file())
    for name in OF_GROUPS:
        yield from (data_dir / GROUPS_FOLDER).glob(f"**/{name}")
    for folder in FOLDERS:
        for path in (data_dir / folder).rglob("*"):
            parts = path.relative_to(data_dir).parts
            is_unsealed = folder == "snapshots" and not data_dir.joinpath(*parts[:3], MANIFEST).exists()
            if path.is_file() and not is_unsealed and not any(part.endswith(UNFINISHED) for part in parts):
                yield path


def _copy_database(source: Path, target: Path) -> None:
    try:
        with closing(sqlite3.connect(source)) as database, closing(sqlite3.connect(target)) as copy:
            database.backup(copy)
    except sqlite3.Error as error:
        raise StartError(f"cannot copy the database {source}: {error}") from error


def _check(destination: Path) -> None:
    """Raise StartError unless the copy has all files that its database refers to."""
    with closing(sqlite3.connect(destination / DATABASE)) as database:
        payloads = database.execute(
            "SELECT payload_file FROM requests WHERE payload_file IS NOT NULL "
            "UNION SELECT result_file FROM requests WHERE result_file IS NOT NULL"
        ).fetchall()
        tables = database.execute("SELECT name FROM sqlite_master WHERE name = 'images'").fetchall()
        if tables:  # else an earlier version has written it
            of_images = "SELECT DISTINCT content_file FROM images WHERE content_file IS NOT NULL"
            payloads += database.execute(of_images).fetchall()
        snapshots = database.execute("SELECT path FROM snapshots").fetchall()
    names = (f"payloads/{number:012d}.zst" for (number,) in payloads)
    missing = [name for name in names if not (destination / name).exists()]
    # The last parts are snapshots/MODEL/SEQ_ID.
    folders = (destination.joinpath(*Path(path).parts[-3:]) for (path,) in snapshots)
    missing += filter(None, map(is_intact, folders))
    if missing:
        raise StartError(
            f"the backup in {destination} lacks files that the database refers to ({missing[0]}); delete it, "
            "and try again"
        )
