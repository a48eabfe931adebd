"""Remembers which programs commands have used, so that the next start compiles those first."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from spmd_tx.durable_files import write_file
from spmd_tx.protocol.programs import ProgramShape

logger = logging.getLogger(__name__)

WRITE_SECONDS = 30.0  # between writes of the file
MOST_KEPT = 256  # programs
MOST_RECENT = 8  # programs whose neighbours are likely to be used next
NEAR = 2.0  # doublings of a size, all sizes together
SIZES = "rows", "row_length", "table", "active"


class _Use(msgspec.Struct, frozen=True):
    program: ProgramShape
    count: float


class ProgramUses:
    """Counts uses. What was used before earlier starts counts half as much with each of them."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the file, if there is a ``path``, and it has a file. Blocks."""
        self._path = path
        self._counts = {use.program: use.count / 2 for use in _read(path)}
        self._recent: deque[ProgramShape] = deque(maxlen=MOST_RECENT)
        self._is_written = True

    def note(self, program: ProgramShape) -> None:
        """Count one use."""
        self._counts[program] = self._counts.get(program, 0.0) + 1.0
        self._is_written = False
        if program not in self._recent:
            self._recent.append(program)

    def in_order(self, menu: Iterable[ProgramShape]) -> list[ProgramShape]:
        """Sort a menu: first what was used, the most used first.

        Rare programs that are not on the menu belong to it if they were used, and if the menu has the usual
        program of the same sizes.
        """
        menu = list(dict.fromkeys(menu))
        known = set(menu)
        rare = [program for program in self._counts if program not in known and usual(program) in known]
        return sorted([*menu, *rare], key=lambda program: -self._counts.get(program, 0.0))

    def next_of(self, programs: Sequence[ProgramShape]) -> ProgramShape:
        """Choose from programs in the order of ``in_order``.

        The first one if it was used; else the nearest to one used lately, if any is near; else the first.
        """
        if programs[0] in self._counts:
            return programs[0]
        distances = [
            min((distance(program, used) for used in self._recent), default=math.inf) for program in programs
        ]
        least = min(distances)
        return programs[distances.index(least) if least <= NEAR else 0]

    async def keep(self) -> NoReturn:
        """Write the file now and then, and at the end."""
        try:
            while True:
                await asyncio.sleep(WRITE_SECONDS)
                if not self._is_written:
                    self._is_written = True
                    await asyncio.to_thread(self._write, self._content())
        finally:
            if not self._is_written:
                self._write(self._content())

    def _content(self) -> bytes:
        most = sorted(self._counts.items(), key=lambda item: -item[1])[:MOST_KEPT]
        return msgspec.json.encode([_Use(program, count) for program, count in most])

    def _write(self, content: bytes) -> None:
        if self._path is None:
            return
        try:
            write_file(self._path, content)
        except OSError as problem:
            logger.warning("cannot write %s: %s", self._path, problem)


def usual(program: ProgramShape) -> ProgramShape:
    """Return the program of the same sizes for usual requests."""
    return msgspec.structs.replace(program, targets=0, sequences=False, top=0, named=0, draws=0)


def distance(one: ProgramShape, other: ProgramShape) -> float:
    """Return how many doublings of sizes lie between two programs of a step; infinity for other steps."""
    if one.step != other.step:
        return math.inf
    sizes = [(getattr(one, name), getattr(other, name)) for name in SIZES]
    if any(bool(size) != bool(another) for size, another in sizes):
        return math.inf
    apart = sum(abs(math.log2(size / another)) for size, another in sizes if size)
    return apart + (one.logprobs != other.logprobs)


def _read(path: Path | None) -> list[_Use]:
    if path is None or not path.exists():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[_Use])
    except (OSError, msgspec.MsgspecError) as problem:
        logger.warning("ignored %s: %s", path, problem)
        return []
