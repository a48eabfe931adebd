"""Starts processes that run our modules, without importing them anew each time.

They are forked from a process that has imported what a coordinator and the SDK need: half of the CPU time of
their start, or more. Workers are forked from another one, since coordinators never load JAX.
Whatever modules read from the environment while they are imported is that of the first start.
"""

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import IO, Any, Self
from unittest import mock

PRELOADED = (
    "pytest",
    "tests.support.coordinator_imports",
    "tinker.cli.__main__",
)  # pytest is the main module
OF_WORKERS = ("pytest", "tests.worker.worker_with_a_sum")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(list(PRELOADED))
_workers = forkserver.ForkServer()
_workers.set_forkserver_preload(list(OF_WORKERS))


class Forked:
    """Runs a function in a process of its own, with the part of Popen's interface that tests use.

    ``stderr``: a file, or None for a pipe. The process has the environment of the caller, or the one given.
    """

    def __init__(
        self,
        function: Callable[..., None],
        *arguments: Any,
        stderr: IO[str] | None = None,
        environment: Mapping[str, str] | None = None,
        is_worker: bool = False,
    ) -> None:
        self._named = f"{function.__module__}:{function.__name__}"
        self.stdout, out = _pipe()
        if stderr is None:
            self.stderr, errors = _pipe()
        else:
            self.stderr, errors = None, Connection(os.dup(stderr.fileno()), readable=False)
        environment = dict(os.environ if environment is None else environment)
        self._process = _context.Process(
            target=_run, args=(self._named, arguments, environment, out, errors), daemon=True
        )
        with out, errors, _from_workers() if is_worker else contextlib.nullcontext():
            self._process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired(self._named, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # its parent, not we, has noticed its end
            if self.poll() is None:
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what it writes until it ends."""
        said = ["", ""]

        def read(place: int, stream: IO[str]) -> None:
            said[place] = stream.read()

        readers = [
            threading.Thread(target=read, args=(place, stream))
            for place, stream in enumerate((self.stdout, self.stderr))
            if stream is not None
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return said[0], said[1]


def _from_workers() -> contextlib.AbstractContextManager[Any]:
    """Fork from the process that has imported JAX."""
    return mock.patch.object(forkserver, "connect_to_new_process", _workers.connect_to_new_process)


def run_spmd_tx(*arguments: str) -> None:
    """Run the command ``spmd-tx`` in this process."""
    from spmd_tx.cli.__main__ import run

    sys.argv[:] = ["spmd-tx", *arguments]
    run()


def _pipe() -> tuple[IO[str], Connection]:
    reading, writing = os.pipe()
    return os.fdopen(reading), Connection(writing, readable=False)


def _run(
    named: str, arguments: tuple[Any, ...], environment: dict[str, str], out: Connection, errors: Connection
) -> None:
    """Run the function, found by its module and name, with these streams and this environment."""
    for connection, number in ((out, 1), (errors, 2)):
        os.dup2(connection.fileno(), number)
        connection.close()
    os.environ.clear()
    os.environ.update(environment)
    if "PYTHONFAULTHANDLER" in environment:
        faulthandler.enable()
    module, _, name = named.partition(":")
    getattr(importlib.import_module(module), name)(*arguments)
