"""Judges whether the machine's clock can be believed, before anything is deleted for its age.

A clock that is wrong at the start, or that is set while the server runs, makes everything old at once. So the
time of the last look is kept in a file. When the clock has moved by more than the time passed plus an hour,
ages are counted on from the file's time, and the new time is believed only after the clock has run evenly for
hours. After a long stop of the server this delays deletions; nothing is lost.
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from spmd_tx.coordinator.runtime.metrics import CLOCK_IN_DOUBT
from spmd_tx.durable_files import write_file
from spmd_tx.errors import UNREADABLE

logger = logging.getLogger(__name__)

JUMP_SECONDS = 3600.0  # beyond the time that has passed
BELIEVED_SECONDS = 6 * 3600.0  # of running evenly, until a clock that has jumped is believed
FILE = "clock.json"  # in the data directory
WRITE_SECONDS = 60.0  # between two writes of the file


class ClockState(msgspec.Struct, frozen=True, kw_only=True):
    """Records what the last look at the clock showed. In seconds since the epoch, unless said."""

    wall: float  # what the clock showed
    believed: float  # what it would have shown if it had not jumped
    even: float | None = None  # seconds for which it has run evenly after a jump; None: there was no jump

    @property
    def for_deletions(self) -> float:
        """The earlier of the two times, so that nothing is deleted too early whichever is right."""
        return min(self.wall, self.believed)


def look(before: ClockState | None, wall: float, elapsed: float) -> ClockState:
    """The state ``elapsed`` seconds after the one ``before``; 0 at a start. Pure."""
    if before is None:
        return ClockState(wall=wall, believed=wall)
    believed = before.believed + elapsed
    if abs(wall - believed) <= JUMP_SECONDS:
        return ClockState(wall=wall, believed=wall)
    is_even = before.even is not None and abs(wall - before.wall - elapsed) <= JUMP_SECONDS
    even = (before.even or 0.0) + elapsed if is_even else 0.0
    if even >= BELIEVED_SECONDS:
        return ClockState(wall=wall, believed=wall)
    return ClockState(wall=wall, believed=believed, even=even)


class ClockGuard:
    """Keeps a data directory's record of the clock. Its methods block."""

    def __init__(
        self,
        data_dir: Path,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = data_dir / FILE
        self._wall, self._steady = wall, steady
        self._state: ClockState | None = None
        self._looked_at: float | None = None  # in steady seconds
        self._written_at: float | None = None
        self._lock = threading.Lock()

    def for_deletions(self) -> float:
        """The time, in seconds since the epoch, by which to judge what has expired."""
        with self._lock:
            now = self._steady()
            if self._looked_at is None:
                self._state, elapsed = _read(self._file), 0.0
            else:
                elapsed = now - self._looked_at
            before, self._state = self._state, look(self._state, self._wall(), elapsed)
            self._looked_at = now
            _report_change(before, self._state)
            if self._written_at is None or now - self._written_at >= WRITE_SECONDS:
                self._written_at = now
                with suppress(OSError):  # a full disk must not stop the deletions that would free it
                    write_file(self._file, msgspec.json.encode(self._state))
            return self._state.for_deletions


def _report_change(before: ClockState | None, after: ClockState) -> None:
    CLOCK_IN_DOUBT.set(after.even is not None)
    was_in_doubt = before is not None and before.even is not None
    if after.even == 0.0:
        logger.error(
            "the machine's clock shows %s, where %s was expected: nothing is deleted for its age until "
            "it has run evenly for %g hours; correct it if it is wrong",
            _format(after.wall),
            _format(after.believed),
            BELIEVED_SECONDS / 3600,
        )
    elif was_in_doubt and after.even is None:
        logger.warning("the machine's clock is believed again, at %s", _format(after.wall))


def _format(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _read(file: Path) -> ClockState | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=ClockState)
    except (FileNotFoundError, *UNREADABLE):
        return None
