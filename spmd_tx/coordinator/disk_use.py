"""How many bytes the parts of a data directory take. Blocks."""

import os
from collections.abc import Iterator
from pathlib import Path

KINDS = (
    "payloads",
    "snapshots",
    "checkpoints",
    "versions",
    "routing",
    "stability",
    "compilation_cache",
    "idle_adapters",
)
DATABASE = "database"
OTHER = "other"


def by_kind(data_dir: Path) -> dict[str, int]:
    """Bytes by kind; hard links that are shared between folders count in each."""
    found: dict[str, int] = dict.fromkeys([*KINDS, DATABASE, OTHER], 0)
    for entry in _entries(data_dir):
        if entry.name.startswith("spmd_tx.db"):
            kind = DATABASE
        else:
            kind = entry.name if entry.name in KINDS else OTHER
        found[kind] += size_of(Path(entry.path))
    return found


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; 0 of what has gone meanwhile."""
    try:
        if not path.is_dir():
            return path.stat().st_size
    except FileNotFoundError:
        return 0
    return sum(size_of(Path(entry.path)) for entry in _entries(path))


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        return
