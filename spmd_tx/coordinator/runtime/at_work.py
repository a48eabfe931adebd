"""Marks the requests that the coordinator is at work on at this moment, in a file that outlives the process.

A request that freezes the process, or ends it without an exception, leaves its mark there, and the next
start counts it (requests/quarantine.py). The file is memory-mapped and never synced: what a process has
written survives its death in the page cache, but not a power failure of the host.
"""

import mmap
import re
import types
from collections.abc import Awaitable, Callable, Generator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

ID_BYTES = 32  # of a request's id, in hexadecimal
SLOTS = 128  # the event loop needs one, and so does each thread that computes
EMPTY = bytes(ID_BYTES)
NO_SLOT = -1  # all slots are in use
_ID = re.compile(rb"[0-9a-f]{32}")

Result = TypeVar("Result")


class Mark:
    """Keeps a request's id in the file while a block runs. The block must not wait for anything."""

    def __init__(
        self, at_work: "AtWork", request_id: str, is_careful: Callable[[], bool] = lambda: False
    ) -> None:
        """``is_careful`` says whether nothing else may be marked meanwhile."""
        self.is_careful = is_careful
        self._at_work = at_work
        self._id = request_id.encode()
        self._slots: list[int] = []

    def __enter__(self) -> None:
        self._slots.append(self._at_work.claim_slot(self._id))

    def __exit__(self, *_: object) -> None:
        self._at_work.release_slot(self._slots.pop())


_current: ContextVar[Mark | None] = ContextVar("mark", default=None)


class AtWork:
    """Holds the marks of one process."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the marks that an earlier process has left, and clear the file. None: keep marks in memory."""
        size = SLOTS * ID_BYTES
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            with path.open("a+b") as file:
                file.truncate(size)
                self._map = mmap.mmap(file.fileno(), size)
        slots = (self._map[at : at + ID_BYTES] for at in range(0, size, ID_BYTES))
        # By an earlier process. Complete ids only: work begins after its id is written in full.
        self.left_behind = frozenset(slot.decode() for slot in slots if _ID.fullmatch(slot))
        self._map[:] = bytes(size)
        self._free_slots = list(range(0, size, ID_BYTES))  # offsets in the file

    def on(self, request_id: str) -> Mark:
        return Mark(self, request_id)

    async def during(
        self,
        request_id: str,
        work: Callable[[], Awaitable[Result]],
        is_careful: Callable[[], bool] = lambda: False,
    ) -> Result:
        """Do work whose computing is marked, in the loop and in threads, but not its waiting.

        While ``is_careful`` says so, it computes in no thread, so that nothing else is marked meanwhile.
        """
        mark = Mark(self, request_id, is_careful)
        token = _current.set(mark)
        try:
            return await _stepwise(mark, work)
        finally:
            _current.reset(token)

    def claim_slot(self, request_id: bytes) -> int:
        """Write an id into a free slot. The result is its offset, or NO_SLOT."""
        if len(request_id) != ID_BYTES or not self._free_slots:
            return NO_SLOT
        slot = self._free_slots.pop()
        self._map[slot : slot + ID_BYTES] = request_id
        return slot

    def release_slot(self, slot: int) -> None:
        if slot != NO_SLOT:
            self._map[slot : slot + ID_BYTES] = EMPTY
            self._free_slots.append(slot)


def current() -> Mark | None:
    """The mark of the request that the calling task works for."""
    return _current.get()


@types.coroutine
def _stepwise(mark: Mark, work: Callable[[], Awaitable[Result]]) -> Generator[Any, Any, Result]:
    """Drive work as ``await`` does, and set the mark whenever the work runs rather than waits."""
    with mark:
        steps = work().__await__()
    value, error = None, None
    while True:
        try:
            with mark:
                awaited = steps.send(value) if error is None else steps.throw(error)
        except StopIteration as end:
            return end.value
        value = error = None
        try:
            value = yield awaited
        except BaseException as thrown:
            error = thrown
