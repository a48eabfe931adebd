"""Whether the machine's clock can be believed before anything is deleted for its age.

A clock that is wrong when the server starts, or that is set while it runs, makes everything old in a moment.
So the time at the last look is kept in a file. When the clock has moved by more than the time passed,
or than a stop of an hour explains, ages are counted on from there, and the new time is only believed once the
clock has run evenly for hours. After a long stop this delays what is to be deleted; it loses nothing.
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

logger = logging.getLogger(__name__)

JUMP_SECONDS = 3600.0  # beyond the time that has passed
BELIEVED_SECONDS = 6 * 3600.0  # of running evenly, until a clock that has jumped is believed
FILE = "clock.json"  # in the data directory
KEEP_SECONDS = 60.0  # between two notes in the file


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the clock since the last look. Seconds since the epoch, unless said."""

    wall: float  # what it showed
    believed: float  # what it would have shown if it had not jumped
    even: float | None = None  # for how many seconds it has run evenly after a jump; None: there was none

    @property
    def for_deletions(self) -> float:
        """The time by which nothing is deleted too early, whichever of the two is right."""
        return min(self.wall, self.believed)


def look(known: Known | None, wall: float, elapsed: float) -> Known:
    """What is known after ``elapsed`` seconds, at a start 0. Pure."""
    if known is None:
        return Known(wall=wall, believed=wall)
    believed = known.believed + elapsed
    if abs(wall - believed) <= JUMP_SECONDS:
        return Known(wall=wall, believed=wall)
    is_even = known.even is not None and abs(wall - known.wall - elapsed) <= JUMP_SECONDS
    even = (known.even or 0.0) + elapsed if is_even else 0.0
    if even >= BELIEVED_SECONDS:
        return Known(wall=wall, believed=wall)
    return Known(wall=wall, believed=believed, even=even)


class ClockGuard:
    """Of a data directory. Blocks."""

    def __init__(
        self,
        data_dir: Path,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = data_dir / FILE
        self._wall, self._steady = wall, steady
        self._known: Known | None = None
        self._looked_at: float | None = None  # in steady seconds
        self._kept_at: float | None = None
        self._lock = threading.Lock()

    def for_deletions(self) -> float:
        """Seconds since the epoch: what has outlived its time then may go."""
        with self._lock:
            now = self._steady()
            if self._looked_at is None:
                self._known, elapsed = _read(self._file), 0.0
            else:
                elapsed = now - self._looked_at
            before, self._known = self._known, look(self._known, self._wall(), elapsed)
            self._looked_at = now
            _tell(before, self._known)
            if self._kept_at is None or now - self._kept_at >= KEEP_SECONDS:
                self._kept_at = now
                with suppress(OSError):  # a full disk is what deleting helps against
                    write_file(self._file, msgspec.json.encode(self._known))
            return self._known.for_deletions


def _tell(before: Known | None, known: Known) -> None:
    CLOCK_IN_DOUBT.set(known.even is not None)
    was_in_doubt = before is not None and before.even is not None
    if known.even == 0.0:
        logger.error(
            "the machine's clock shows %s, where %s was expected: nothing is deleted for its age until "
            "it has run evenly for %g hours; correct it if it is wrong",
            _shown(known.wall),
            _shown(known.believed),
            BELIEVED_SECONDS / 3600,
        )
    elif was_in_doubt and known.even is None:
        logger.warning("the machine's clock is believed again, at %s", _shown(known.wall))


def _shown(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _read(file: Path) -> Known | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Known)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
