"""Keeps compiled programs as files, so that a later start neither traces nor compiles them.

JAX's persistent cache saves XLA's work only: a program has to be traced and lowered to be found there.
"""

import hashlib
import logging
import os
import pickle
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from spmd_tx.worker.programs.call import Call

logger = logging.getLogger(__name__)

PREFIX = "program-"  # of the names of files
FORMAT = b"spmd_tx program 1\n"
OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class ProgramStore:
    """Reads and writes programs in a folder, for any number of processes and threads at once.

    Reading a file runs what is in it, so the folder must be as trusted as the code. Files of other users, and
    files that others may write, are not read.
    """

    def __init__(self, folder: Path, surroundings: str, mesh: Mesh) -> None:
        """``surroundings`` tells everything that programs depend on besides their own descriptions."""
        self._folder = folder
        self._surroundings = surroundings
        self._mesh = mesh

    def has(self, call: Call) -> bool:
        return self._path(call).exists()

    def load(self, call: Call) -> jax.stages.Compiled | None:
        """Return the program; None if it is not there, or its file is of no use."""
        path = self._path(call)
        try:
            compiled = self._loaded(_content(path), call)
            os.utime(path)  # for those who delete what was unused for longest
        except FileNotFoundError:
            return None
        except Exception as problem:  # whatever is wrong with a file, the program is compiled instead
            logger.warning("cannot load %s from %s, which is deleted: %s", call, path, problem)
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        return compiled

    def save(self, call: Call, compiled: jax.stages.Compiled) -> None:
        """Write a program. It must have been compiled in this process, not loaded from JAX's cache.

        A program that XLA has loaded lacks its object code when it is serialized again, and fails only when
        it is run. One that XLA cannot serialize, as it cannot some that sort, is left out and compiled again
        by the next start. Raises OSError.
        """
        try:
            serialized, _, out_tree = serialize_executable.serialize(compiled)
        except jax.errors.JaxRuntimeError as problem:
            logger.info("%s is not kept: %s", call, problem)
            return
        content = pickle.dumps((serialized, jax.tree.unflatten(out_tree, range(out_tree.num_leaves))))
        path = self._path(call)
        unfinished = path.with_name(f"{path.name}.{os.getpid()}")
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with open(unfinished, "wb", opener=_private) as file:
                file.write(FORMAT + hashlib.sha256(content).digest() + content)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def _path(self, call: Call) -> Path:
        text = f"{self._surroundings}\n{call.description(self._mesh)}"
        return self._folder / f"{PREFIX}{hashlib.sha256(text.encode()).hexdigest()}"

    def _loaded(self, content: bytes, call: Call) -> jax.stages.Compiled:
        serialized, output = pickle.loads(content)
        arguments: Any = (call.abstract(self._mesh), {})
        return serialize_executable.deserialize_and_load(
            serialized,
            jax.tree.structure(arguments),
            jax.tree.structure(output),
            execution_devices=list(self._mesh.devices.flat),
        )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _content(path: Path) -> bytes:
    """Return the pickled content. Raises ValueError if the file is damaged, or somebody else's."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & OF_OTHERS:
            raise ValueError("it belongs to another user, or others may write it")
        whole = file.read()
    content = whole[len(FORMAT) + hashlib.sha256().digest_size :]
    if whole != FORMAT + hashlib.sha256(content).digest() + content:
        raise ValueError("it is damaged")
    return content
