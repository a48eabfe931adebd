"""Tells a thread that waits for commands that a result is there."""

import contextlib
import socket
import threading
from queue import SimpleQueue
from typing import Any

import jax


def is_complete(result: Any) -> bool:
    """Return whether the devices have computed all arrays of a result."""
    return all(array.is_ready() for array in _arrays(result))


def _arrays(result: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, jax.Array)]


class ResultSignal:
    """Waits for results in a thread of its own, while it is entered. A poller can wait for it."""

    def __init__(self) -> None:
        self._here, self._there = socket.socketpair()
        self._here.setblocking(False)
        self._results: SimpleQueue[list[Any] | None] = SimpleQueue()
        self._awaited, self._complete = 0, 0  # results so far
        self._thread = threading.Thread(target=self._run, name="results", daemon=True)

    def __enter__(self) -> "ResultSignal":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._results.put(None)  # the thread may wait for what never comes
        self._here.close()

    def fileno(self) -> int:
        """Return the descriptor that can be read when a result is there, also one of earlier."""
        return self._here.fileno()

    def wait_for(self, result: Any) -> None:
        """Begin to wait for a result."""
        self._awaited += 1
        self._results.put(_arrays(result))

    def is_over(self) -> bool:
        """Return whether all results are there that were waited for."""
        with contextlib.suppress(BlockingIOError):
            self._complete += len(self._here.recv(64))
        return self._complete == self._awaited

    def _run(self) -> None:
        with self._there, contextlib.suppress(OSError):  # the other end is closed
            while (arrays := self._results.get()) is not None:
                with contextlib.suppress(Exception):  # whoever reads the arrays finds out
                    jax.block_until_ready(arrays)
                del arrays
                self._there.send(b".")
