"""Packs prompts, or chunks of them, into the rows of one Prefill, first fit. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from spmd_tx.coordinator.images.pool import ImagePool
from spmd_tx.coordinator.images.prepared import ImageKey
from spmd_tx.coordinator.images.seen import SeenImage
from spmd_tx.coordinator.sampling.bank import VersionKey
from spmd_tx.coordinator.sampling.cache.pages import TRASH_PAGE, pages_for
from spmd_tx.coordinator.sampling.cache.state_moves import Copy, StateMoves, copy_array
from spmd_tx.coordinator.sampling.cache.state_slots import NOTHING
from spmd_tx.coordinator.sampling.request import prompt_scores
from spmd_tx.coordinator.sampling.request.prompt_images import AXES, PromptImages
from spmd_tx.coordinator.sampling.request.prompt_scores import PromptScoring, Scores
from spmd_tx.coordinator.sampling.shapes import SamplingShapes
from spmd_tx.protocol.commands import SEGMENTS_PER_ROW, PackedRows, Prefill
from spmd_tx.protocol.programs import ProgramShape


@dataclass(frozen=True)
class PrefillChunk:
    """Holds the tokens of one prompt from ``first`` to ``end``, and where they belong."""

    shard: int
    version: VersionKey
    bank: int
    content: list[int]  # tokens of the whole prompt
    pages: list[int]  # pages of the whole prompt
    first: int  # position; earlier ones are in the pages already, or will be by this Prefill
    end: int  # exclusive; at most the position of the prompt's last token
    state: int = 0  # slot in which the row leaves its state, and finds that of earlier tokens; 0: none
    sight: PromptImages | None = None  # the prompt's images

    @property
    def length(self) -> int:
        return self.end - self.first

    @property
    def images(self) -> list[SeenImage]:
        """The images that it reads."""
        return [] if self.sight is None else self.sight.within(self.first, self.end)


@dataclass(frozen=True)
class PromptSegment:
    """Holds the place of a chunk in a Prefill."""

    chunk: PrefillChunk
    row: int  # within the shard
    start: int

    @property
    def length(self) -> int:
        return self.chunk.length

    @property
    def place(self) -> slice:
        """The segment's columns in its row."""
        return slice(self.start, self.start + self.length)


@dataclass
class _Row:
    version: VersionKey
    used: int = 0
    segments: int = 0


class PrefillPlan:
    """Collects chunks and page copies. A row holds segments of one version on one data shard.

    When the first chunk continues behind what its pages hold, or rows are read in pieces, every row has one
    segment only. So it is for models that keep a state of each sequence, too.
    """

    def __init__(
        self, shapes: SamplingShapes, pool: ImagePool, *, copies: int, has_states: bool = False
    ) -> None:
        self._shapes = shapes
        self._most_copies = copies  # per data shard; padded to this number, so that the shape is fixed
        self.states = StateMoves(shapes.shards, copies) if has_states else None
        self._rows: list[list[_Row]] = [[] for _ in range(shapes.shards)]
        self._copies: list[list[Copy]] = [[] for _ in range(shapes.shards)]
        self._segments: list[PromptSegment] = []
        self._row_length = shapes.row_lengths[0]
        self._table = 0  # pages of a row's table; 0: no tables
        self._scores = plain_scores(shapes)
        self._pool = pool
        self.images: list[SeenImage] = []  # that the chunks read

    @property
    def is_empty(self) -> bool:
        return not self._segments and not any(self._copies) and not self.states

    @property
    def scores(self) -> Scores | None:
        """What the Prefill computes of prompts; None: it reads none yet."""
        return self._scores if self._segments else None

    def copies_left(self, shard: int) -> int:
        left = self._most_copies - len(self._copies[shard])
        return left if self.states is None else min(left, self.states.rows_left(shard))

    def fits(self, chunk: PrefillChunk) -> bool:
        """Return whether a chunk can join without making the Prefill too large."""
        if not self._segments or not chunk.length:
            return True
        if (chunk.first and not self._table) or not self._pool.fits([*self.images, *chunk.images]):
            return False
        return self._shapes.may_prefill(*self._size_with(chunk)[:2])

    def program_with(self, chunk: PrefillChunk, scores: Scores) -> ProgramShape:
        """Return the program that the Prefill needs if a fitting chunk joins."""
        return self._program(*self._size_with(chunk), self._scores.and_of(scores))

    @property
    def program(self) -> ProgramShape:
        """The program that the Prefill needs."""
        return self._program(self._used_rows, self._row_length, self._table, self._scores)

    @property
    def _used_rows(self) -> int:
        """The rows of the data shard that has most of them."""
        return max(len(rows) for rows in self._rows)

    def _size_with(self, chunk: PrefillChunk) -> tuple[int, int, int]:
        """Return rows per data shard, their length and the width of their tables, if a chunk joins."""
        row_length = self._shapes.row_length(max(self._row_length, chunk.length))
        counts, table = [len(rows) for rows in self._rows], self._table
        if chunk.length:
            counts[chunk.shard] += self._row_for(chunk, row_length) is None
            table = self._shapes.table if self._has_table(chunk) else 0
        return self._shapes.rows_of_prefill(max(counts)), row_length, table

    def _program(self, rows: int, row_length: int, table: int, scores: Scores) -> ProgramShape:
        return ProgramShape(
            step="prefill",
            rows=(self._shapes.prefill_block or self._shapes.rows_of_prefill(rows)) * self._shapes.shards,
            row_length=self._shapes.piece or row_length,
            table=self._shapes.table if self._shapes.piece else table,
            **scores._asdict(),
        )

    def add(self, chunk: PrefillChunk, scores: Scores) -> PromptSegment:
        """Place a chunk; it must fit."""
        self._scores = self._scores.and_of(scores)
        self.images += chunk.images
        self._row_length = self._shapes.row_length(max(self._row_length, chunk.length))
        if self._has_table(chunk):
            self._table = self._shapes.table
        row = self._row_for(chunk, self._row_length)
        if row is None:
            row = len(self._rows[chunk.shard])
            self._rows[chunk.shard].append(_Row(chunk.version))
        place = self._rows[chunk.shard][row]
        segment = PromptSegment(chunk, row, place.used)
        place.used += chunk.length
        place.segments += 1
        self._segments.append(segment)
        return segment

    def copy(self, shard: int, copies: Sequence[Copy]) -> None:
        """Copy pages after the Prefill has written to them."""
        self._copies[shard] += copies

    def row_of(self, segment: PromptSegment, program: ProgramShape) -> int:
        """Return the segment's row in the command for a program, once all segments are placed."""
        return segment.chunk.shard * self._command_rows(program) + segment.row

    def _command_rows(self, program: ProgramShape) -> int:
        """Return the rows of each data shard in the command for a program."""
        if self._shapes.prefill_block:
            return self._shapes.rows_of_prefill(self._used_rows)
        return program.rows // self._shapes.shards

    def command(
        self,
        scored: Sequence[tuple[PromptScoring, PromptSegment]],
        program: ProgramShape,
        vocab_size: int,
        ids: Mapping[ImageKey, np.ndarray] = MappingProxyType({}),
    ) -> Prefill:
        """Build the command for a program that is large enough.

        ``scored`` are the segments whose scores are wanted besides keys and values; ``ids`` stand for the
        tokens of ``images``.
        """
        length = self._row_length if self._shapes.piece else program.row_length
        shape, width = (self._command_rows(program) * self._shapes.shards, length), program.table
        tokens, targets, segments, positions, pages = (np.zeros(shape, np.int32) for _ in range(5))
        pages[:] = TRASH_PAGE
        numbers, slots, state_sources, state_targets = np.zeros((4, shape[0]), np.int32)
        tables = np.full((shape[0], width), TRASH_PAGE, np.int32) if width else None
        for segment in self._segments:
            chunk, row = segment.chunk, self.row_of(segment, program)
            place = row, segment.place
            counter = np.arange(chunk.first, chunk.end)
            numbers[row], slots[row] = numbers[row] + 1, chunk.bank
            tokens[place] = chunk.content[chunk.first : chunk.end]
            targets[place] = chunk.content[chunk.first + 1 : chunk.end + 1]
            segments[place], positions[place] = numbers[row], counter
            if chunk.sight is not None:
                chunk.sight.fill(tokens[place], chunk.first, ids)
            state_sources[row], state_targets[row] = chunk.state if chunk.first else NOTHING, chunk.state
            pages[place] = np.asarray(chunk.pages, np.int32)[counter // self._shapes.page_size]
            if tables is not None:
                read = chunk.pages[: pages_for(chunk.end, self._shapes.page_size)]
                tables[row, : len(read)] = read
        placed = [
            (scoring, (self.row_of(segment, program), segment.place), segment.chunk.first)
            for scoring, segment in scored
        ]
        return Prefill(
            rows=PackedRows(
                tokens=tokens,
                targets=np.maximum(targets, 0),  # nobody wants the scores of image tokens
                segments=segments,
                positions=positions,
                slots=slots,
                places=self._places(positions, program),
            ),
            pages=pages,
            copies=copy_array(self._copies, self._most_copies),
            logprobs=program.logprobs,
            wishes=prompt_scores.for_device(shape, placed, vocab_size),
            tables=tables,
            block=self._shapes.prefill_block,
            piece=self._shapes.piece,
            states=None if self.states is None else self.states.of_rows(state_sources, state_targets),
        )

    def _places(self, positions: np.ndarray, program: ProgramShape) -> np.ndarray | None:
        """Return time, row and column of all tokens; None: they are the positions."""
        if not any(segment.chunk.sight for segment in self._segments):
            return None
        places = np.repeat(positions[..., None], AXES, axis=2)
        for segment in self._segments:
            chunk = segment.chunk
            if chunk.sight is not None:
                where = self.row_of(segment, program), segment.place
                places[where] = chunk.sight.places(chunk.first, chunk.end)
        return places

    def _has_table(self, chunk: PrefillChunk) -> bool:
        """Return whether rows have tables once this chunk has joined."""
        return bool(self._table or chunk.first or self._shapes.piece)

    def _row_for(self, chunk: PrefillChunk, row_length: int) -> int | None:
        if self._table or self.states is not None:
            return None
        fitting = (
            number
            for number, row in enumerate(self._rows[chunk.shard])
            if row.version == chunk.version
            and row.used + chunk.length <= row_length
            and row.segments < SEGMENTS_PER_ROW
        )
        return next(fitting, None)


def plain_scores(shapes: SamplingShapes) -> Scores:
    """Return what a Prefill computes that reads no prompt with scores, or only copies pages."""
    return Scores(logprobs=shapes.batch_invariant)  # one program, whether they are wanted or not
