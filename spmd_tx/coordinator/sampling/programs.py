"""Finds the compiled programs for sampling commands. Pure.

A program may be larger than needed; the better one is compiled meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from spmd_tx.coordinator.mesh.program_orders import ProgramOrders
from spmd_tx.coordinator.sampling.job import Sample
from spmd_tx.coordinator.sampling.request.prompt_scores import PromptScoring, Scores, width
from spmd_tx.coordinator.sampling.riders import saves_time
from spmd_tx.coordinator.sampling.shapes import SamplingShapes
from spmd_tx.protocol.commands import CHUNK_STEPS
from spmd_tx.protocol.programs import ProgramShape


class DecodeShape(NamedTuple):
    """Holds the sizes of a Decode."""

    program: ProgramShape
    rows: int  # of each data shard
    block: int  # rows of each data shard that the program takes at once; 0: all
    known_steps: int  # steps that may be fed known tokens; 0: none


@dataclass(frozen=True)
class SamplingPrograms:
    """Chooses programs in one generation of workers."""

    programs: ProgramOrders
    shapes: SamplingShapes
    bank_slots: int
    decode_steps: int  # most steps of one Decode
    vocab_size: int

    def covers(self, program: ProgramShape, needed: ProgramShape) -> bool:
        """Return whether a Decode that needs one program may run as another."""
        return program == needed if self.shapes.batch_invariant else _covers(program, needed)

    def scores(self, scoring: PromptScoring) -> Scores:
        """Return what a Prefill with this scoring computes."""
        named = scoring.targets.width if scoring.targets is not None else 0
        return Scores(True, width(scoring.top, self.vocab_size), width(named), width(scoring.draws))

    def prefill(self, needed: ProgramShape) -> ProgramShape | None:
        """Return the smallest ready program that covers ``needed``; None: there is none."""
        if self.programs.is_ready(needed):
            return needed
        large_enough = [
            program
            for program in self.programs.ready("prefill")
            if program.rows >= needed.rows
            and program.row_length >= needed.row_length
            and program.table == needed.table
            and _scores(program) == _scores(needed)
        ]
        return min(large_enough, key=lambda each: each.rows * each.row_length, default=None)

    def first_decode(self, part: Sequence[Sample]) -> ProgramShape | None:
        """Return the missing program for the first Decode of samples that start together; None: none is."""
        alone = self.decode([[part[0]]])
        if self.programs.is_ready(alone) or any(
            self.covers(each, alone) for each in self.programs.ready("decode")
        ):
            return None
        rows = self.shapes.rows_of_decode(min(len(part), self.shapes.rows))
        together = self.decode([list(part[:rows])])
        return alone if self.programs.has_failed(together) else together

    def decode(self, samples: Sequence[Sequence[Sample]]) -> ProgramShape:
        """Return the program for a Decode of the samples of each data shard."""
        everybody = [sample for each in samples for sample in each]
        guided = [sample for sample in everybody if sample.guide is not None]
        rows = self.shapes.decode_block or self.shapes.rows_of_decode(max(map(len, samples)))
        rows *= self.shapes.shards
        used = len({sample.bank for sample in everybody})
        return ProgramShape(
            step="decode",
            rows=rows,
            active=next(size for size in self.shapes.active_sizes(rows, self.bank_slots) if size >= used),
            top=width(max(job.top for job in {sample.job for sample in everybody}), self.vocab_size),
            masked=(is_masked := any(map(self.needs_masks, guided))),
            speculative=self.shapes.decodes_speculate and not is_masked,
        )

    def speculative(self, samples: Sequence[Sequence[Sample]], rows: int) -> ProgramShape:
        """Return the program for a Decode with ``rows`` rows of each data shard, some of them followers."""
        everybody = [sample for each in samples for sample in each]
        used, rows = len({sample.bank for sample in everybody}), rows * self.shapes.shards
        sizes = self.shapes.active_sizes(rows, self.bank_slots)
        active = next(size for size in sizes if size >= used)
        return replace(self.decode(samples), rows=rows, active=active, speculative=True)

    def beside_chunks(
        self, program: ProgramShape | None, samples: Sequence[Sequence[Sample]], prompts: Sequence[Sample]
    ) -> ProgramShape | None:
        """Return a program for the Decode of ``program`` that reads a chunk of these prompts, too.

        None: it is not ready, or would save no time. A prompt is given by a sample of it.
        """
        if program is None or program.masked or program.speculative or self.decode_steps < CHUNK_STEPS:
            return None
        if not saves_time(self.shapes, program.rows // self.shapes.shards):
            return None
        everybody = [*prompts, *(sample for each in samples for sample in each)]
        if any(sample.job.is_lonely for sample in everybody):
            return None
        used, sizes = len({sample.bank for sample in everybody}), self.shapes.active_sizes
        active = next((size for size in sizes(program.rows, self.bank_slots) if size >= used), 0)
        if not active:  # a model of its own for each version
            return None
        needed = replace(program, active=max(active, program.active), chunk=self.shapes.chunk_beside)
        if self.programs.is_ready(needed):
            return needed
        if prompts:
            self.programs.prefer(needed)
        ready = [each for each in self.programs.ready("decode") if _covers(each, needed)]
        return min(ready, key=lambda each: (each.rows, each.active, each.top), default=None)

    def needs_masks(self, sample: Sample) -> bool:
        """Return whether the next Decode of a sample needs a program that takes masks.

        A batch-invariant one computes all of its tokens by the same program.
        """
        return sample.guide is not None if self.shapes.batch_invariant else sample.is_masked

    def decode_shape(self, program: ProgramShape, chosen: Sequence[Sequence[Sample]]) -> DecodeShape:
        """Return the sizes of a Decode that runs a program for these samples of each data shard."""
        if not self.shapes.batch_invariant:
            known_steps = self.decode_steps if program.masked else 0
            return DecodeShape(program, program.rows // self.shapes.shards, 0, known_steps)
        rows = self.shapes.rows_of_decode(max(map(len, chosen)))
        return DecodeShape(program, rows, self.shapes.decode_block, self.decode_steps)


def _covers(program: ProgramShape, needed: ProgramShape) -> bool:
    is_large_enough = program.rows >= needed.rows and program.active >= needed.active
    is_wide_enough = program.top >= needed.top and program.masked >= needed.masked
    is_alike = program.speculative == needed.speculative and program.chunk == needed.chunk
    return is_large_enough and is_wide_enough and is_alike


def _scores(program: ProgramShape) -> Scores:
    return Scores(program.logprobs, program.top, program.named, program.draws)
