"""Which requests the coordinator is at work on at this moment, in a file that outlives the process.

What freezes it, or ends it without an exception, leaves its mark, and the next start counts it
(quarantine.py). The file is mapped and never synced: what a process has written there survives its death
in the page cache. Nothing is claimed of hosts that lose power.
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
NOTHING = bytes(ID_BYTES)
NO_SLOT = -1  # more at once than there is room for
_ID = re.compile(rb"[0-9a-f]{32}")

Result = TypeVar("Result")


class Mark:
    """Of one request: it stands in the file while a block runs. A block must not wait for anything."""

    def __init__(self, at_work: "AtWork", request_id: str) -> None:
        self._at_work = at_work
        self._id = request_id.encode()
        self._slots: list[int] = []

    @property
    def is_careful(self) -> bool:
        """Whether nothing else may be marked meanwhile."""
        return bool(self._at_work.suspects)

    def __enter__(self) -> None:
        self._slots.append(self._at_work.take(self._id))

    def __exit__(self, *_: object) -> None:
        self._at_work.free(self._slots.pop())


_current: ContextVar[Mark | None] = ContextVar("mark", default=None)


class AtWork:
    """The marks of one process."""

    def __init__(self, path: Path | None = None) -> None:
        """See what an earlier process has left, and begin anew. None: in memory, for a process without."""
        self.suspects: set[str] = set()  # requests that are to be alone at work, as they may end it
        size = SLOTS * ID_BYTES
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            with path.open("a+b") as file:
                file.truncate(size)
                self._map = mmap.mmap(file.fileno(), size)
        self.found = frozenset(found.decode() for found in self._found())
        self._map[:] = bytes(size)
        self._free = list(range(0, size, ID_BYTES))  # where in the file

    def on(self, request_id: str) -> Mark:
        return Mark(self, request_id)

    async def during(self, request_id: str, work: Callable[[], Awaitable[Result]]) -> Result:
        """Do work of which every part that computes is marked, in the loop or in threads; waiting is not."""
        mark = Mark(self, request_id)
        token = _current.set(mark)
        try:
            return await _stepwise(mark, work)
        finally:
            _current.reset(token)

    def take(self, request_id: bytes) -> int:
        if len(request_id) != ID_BYTES or not self._free:
            return NO_SLOT
        slot = self._free.pop()
        self._map[slot : slot + ID_BYTES] = request_id
        return slot

    def free(self, slot: int) -> None:
        if slot != NO_SLOT:
            self._map[slot : slot + ID_BYTES] = NOTHING
            self._free.append(slot)

    def _found(self) -> list[bytes]:
        """One that was not written to its end was not begun."""
        slots = (self._map[at : at + ID_BYTES] for at in range(0, SLOTS * ID_BYTES, ID_BYTES))
        return [slot for slot in slots if _ID.fullmatch(slot)]


def current() -> Mark | None:
    """Of the request that is worked for here."""
    return _current.get()


@types.coroutine
def _stepwise(mark: Mark, work: Callable[[], Awaitable[Result]]) -> Generator[Any, Any, Result]:
    """Drive work as ``await`` does, with the mark set from each time that it goes on until it waits."""
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
