"""Writes the folder of an export beside its place, so that it is whole when it appears. No JAX.

An export that was interrupted goes on in the folder that it had begun.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import file_digest
from pathlib import Path

from spmd_tx.durable_files import make_folder, put_in_place, sync_tree, write_file
from spmd_tx.errors import StartError
from spmd_tx.models.adapter_formats.files import CONFIG_FILE, WEIGHTS_FILE

STAGED = ".partial"  # suffix of what is being written
IDENTITY = "export.json"  # in the staged folder: what is exported

Identity = dict[str, str]


def identity(adapter: Path, **options: str) -> Identity:
    """Return what tells one export from another: the content of the adapter, and the options."""
    return options | {name: digest(adapter / name) for name in (CONFIG_FILE, WEIGHTS_FILE)}


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "blake2b").hexdigest()


@contextmanager
def staged(place: Path, exported: Identity) -> Iterator[Path]:
    """Yield the folder to write, which becomes ``place`` after the block. Raises StartError.

    It may hold what an interrupted export of the same identity has written.
    """
    check_place(place)
    folder = place.with_name(place.name + STAGED)
    try:
        _open(folder, json.dumps(exported, indent=2).encode())
        try:
            yield folder
        except StartError:
            shutil.rmtree(folder, ignore_errors=True)  # what is refused would be refused again
            raise
        sync_tree(folder)
        put_in_place(folder, place)
        (place / IDENTITY).unlink()  # until here an export that is killed goes on
    except OSError as problem:
        raise _unwritable(place, problem) from problem


def check_place(place: Path) -> None:
    """Raise StartError unless a folder can be made there, as far as this can be known before."""
    if os.path.lexists(place):
        raise StartError(f"{place} exists already; name a folder that does not, or remove it")
    parent = next(each for each in place.absolute().parents if os.path.lexists(each))
    if not (os.path.isdir(parent) and os.access(parent, os.W_OK)):
        raise _unwritable(place, f"{parent} is not a folder that can be written")


def _unwritable(place: Path, problem: object) -> StartError:
    return StartError(
        f"cannot write {place}: {problem}; name another folder, or make room and run the export again"
    )


def _open(folder: Path, content: bytes) -> None:
    if not folder.exists() or all(each.name.startswith(".") for each in folder.iterdir()):
        make_folder(folder)
        write_file(folder / IDENTITY, content)
        return
    file = folder / IDENTITY
    if not file.exists() or file.read_bytes() != content:
        raise StartError(
            f"{folder} holds the begin of another export; remove it, or name another folder with --out"
        )
