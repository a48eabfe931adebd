"""Packs prompts, first fit, into the rows of one Prefill. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spmd_tx.coordinator import prompt_wishes
from spmd_tx.coordinator.buckets import SHORTEST_ROW, power_of_four, power_of_two
from spmd_tx.coordinator.dispatch import VersionKey
from spmd_tx.coordinator.pages import TRASH_PAGE, pages_for
from spmd_tx.coordinator.prompt_wishes import Wishes
from spmd_tx.coordinator.shard import Start
from spmd_tx.protocol import SEGMENTS_PER_ROW, PackedRows, Prefill

NARROWEST_CONTINUED_TABLE = 16  # pages


@dataclass(frozen=True)
class Segment:
    """The place of one prompt; its last token is not in it."""

    shard: int
    row: int  # within the shard
    start: int
    content: list[int]
    pages: list[int]
    first: int  # position; those before it are in the pages already

    @property
    def length(self) -> int:
        return len(self.content) - 1 - self.first

    @property
    def place(self) -> slice:
        """In its row."""
        return slice(self.start, self.start + self.length)


@dataclass
class _Row:
    version: VersionKey
    bank: int
    used: int = 0
    segments: int = 0


class PrefillPlan:
    """Collects segments and copies; a row holds segments of one version on one data shard.

    When the first segment goes on behind what its pages hold, every row has one segment only.
    """

    def __init__(self, *, shards: int, page_size: int, tokens: int, copies: int) -> None:
        self._page_size = page_size
        self._tokens = tokens  # most per data shard, unless one row alone is longer
        self._most_copies = copies  # per data shard; all are sent, so that the shape is always the same
        self._rows: list[list[_Row]] = [[] for _ in range(shards)]
        self._copies: list[list[tuple[int, int]]] = [[] for _ in range(shards)]
        self._segments: list[Segment] = []
        self._row_length = SHORTEST_ROW
        self._table = 0  # pages of a row's table; 0: there are none

    @property
    def is_empty(self) -> bool:
        return not self._segments and not any(self._copies)

    def copies_left(self, shard: int) -> int:
        return self._most_copies - len(self._copies[shard])

    def fits(self, shard: int, version: VersionKey, length: int, first: int) -> bool:
        """Whether so many tokens of a prompt, from this position on, can join.

        The Prefill must not become too large. Every token looks at all that a row's table holds.
        """
        if not self._segments or not length:
            return True
        if first and not self._table:
            return False
        row_length = power_of_two(self._row_length, length)
        counts = [len(rows) for rows in self._rows]
        counts[shard] += self._row_for(shard, version, length, row_length) is None
        rows = power_of_four(max(counts))
        seen = row_length
        if self._table:
            seen = max(seen, self._page_size * self._wide_enough(pages_for(first + length, self._page_size)))
        return rows == 1 or rows * seen <= self._tokens

    def add(self, shard: int, version: VersionKey, bank: int, content: list[int], start: Start) -> Segment:
        """Place a prompt whose keys and values go to these pages, behind those that are there."""
        pages, first = start.pages, start.written
        length = len(content) - 1 - first
        if self._table or first:
            self._table = self._wide_enough(len(pages))
        self._row_length = power_of_two(self._row_length, length)
        row = self._row_for(shard, version, length, self._row_length)
        if row is None:
            row = len(self._rows[shard])
            self._rows[shard].append(_Row(version, bank))
        place = self._rows[shard][row]
        segment = Segment(shard, row, place.used, content, pages, first)
        place.used += length
        place.segments += 1
        self._segments.append(segment)
        return segment

    def copy(self, shard: int, copies: list[tuple[int, int]]) -> None:
        """Copy pages after everything is written."""
        self._copies[shard] += copies

    @property
    def rows_per_shard(self) -> int:
        return power_of_four(max(len(rows) for rows in self._rows))

    def row_of(self, segment: Segment) -> int:
        """The segment's row in the command, once all segments are there."""
        return segment.shard * self.rows_per_shard + segment.row

    def command(self, scored: Sequence[tuple[Wishes, Segment]], vocab_size: int) -> Prefill:
        """Write everything down. Of the scored segments more is wanted than keys and values."""
        shape = (len(self._rows) * self.rows_per_shard, self._row_length)
        tokens, targets, segments, positions, pages = (np.zeros(shape, np.int32) for _ in range(5))
        pages[:] = TRASH_PAGE
        numbers = np.zeros(shape[0], np.int32)
        tables = np.full((shape[0], self._table), TRASH_PAGE, np.int32) if self._table else None
        for segment in self._segments:
            row = self.row_of(segment)
            place = row, segment.place
            counter = np.arange(segment.first, len(segment.content) - 1)
            numbers[row] += 1
            tokens[place] = segment.content[segment.first : -1]
            targets[place] = segment.content[segment.first + 1 :]
            segments[place], positions[place] = numbers[row], counter
            pages[place] = np.asarray(segment.pages, np.int32)[counter // self._page_size]
            if tables is not None:
                tables[row, : len(segment.pages)] = segment.pages
        packed = PackedRows(
            tokens=tokens,
            targets=targets,
            segments=segments,
            positions=positions,
            slots=self._slots(shape[0]),
        )
        placed = [
            (wishes, (self.row_of(segment), segment.place), segment.first) for wishes, segment in scored
        ]
        return Prefill(
            rows=packed,
            pages=pages,
            copies=self._copy_array(),
            logprobs=bool(scored),
            wishes=prompt_wishes.for_device(shape, placed, vocab_size),
            tables=tables,
        )

    def _wide_enough(self, pages: int) -> int:
        """The width of tables if there is one with so many pages."""
        return power_of_four(max(self._table, pages, NARROWEST_CONTINUED_TABLE))

    def _slots(self, count: int) -> np.ndarray:
        slots = np.zeros(count, np.int32)
        for shard, rows in enumerate(self._rows):
            for number, row in enumerate(rows):
                slots[shard * self.rows_per_shard + number] = row.bank
        return slots

    def _copy_array(self) -> np.ndarray:
        copies = np.full((len(self._copies), self._most_copies, 2), TRASH_PAGE, np.int32)
        for shard, pairs in enumerate(self._copies):
            if pairs:
                copies[shard, : len(pairs)] = pairs
        return copies.reshape(-1, 2)

    def _row_for(self, shard: int, version: VersionKey, length: int, row_length: int) -> int | None:
        if self._table:
            return None
        fitting = (
            number
            for number, row in enumerate(self._rows[shard])
            if row.version == version and row.used + length <= row_length and row.segments < SEGMENTS_PER_ROW
        )
        return next(fitting, None)
