"""Which programs the commands of sampling need, and which ready ones will do. Pure.

A larger program than the one that is needed does as well; the one that would be better is compiled meanwhile.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from spmd_tx.coordinator.sampling.job import Sample
from spmd_tx.coordinator.sampling.pages import pages_for
from spmd_tx.coordinator.sampling.prompt_scores import NARROWEST, PromptScoring, Scores, width
from spmd_tx.coordinator.sampling.shapes import SamplingShapes, power_of_two
from spmd_tx.protocol.commands import active_sizes
from spmd_tx.protocol.programs import ProgramShape


class Programs(Protocol):
    """What is used of the orders of programs."""

    def is_ready(self, program: ProgramShape) -> bool: ...

    def ready(self, step: str) -> Iterable[ProgramShape]: ...

    def has_failed(self, program: ProgramShape) -> bool: ...

    def prefer(self, program: ProgramShape) -> None: ...

    def reason(self, program: ProgramShape) -> str: ...


class EverythingReady:
    """Programs of workers that compile nothing."""

    def is_ready(self, program: ProgramShape) -> bool:
        return True

    def ready(self, step: str) -> Iterable[ProgramShape]:
        return ()

    def has_failed(self, program: ProgramShape) -> bool:
        return False

    def prefer(self, program: ProgramShape) -> None:
        """Nothing is better than what is there."""

    def reason(self, program: ProgramShape) -> str:
        raise AssertionError(f"nobody waits for {program}")


@dataclass(frozen=True)
class SamplingPrograms:
    """Of one generation of workers."""

    programs: Programs
    shapes: SamplingShapes
    bank_slots: int
    decode_steps: int  # most of one Decode
    vocab_size: int

    def scores(self, scoring: PromptScoring) -> Scores:
        """Of a Prefill that brings what is wished for."""
        named = scoring.targets.width if scoring.targets is not None else 0
        return Scores(
            True,
            width(scoring.top, self.vocab_size),
            power_of_two(NARROWEST, named) if named else 0,
            power_of_two(NARROWEST, scoring.draws) if scoring.draws else 0,
        )

    def prefill(self, needed: ProgramShape) -> ProgramShape | None:
        """The smallest that will do."""
        if self.programs.is_ready(needed):
            return needed
        large_enough = [
            program
            for program in self.programs.ready("prefill")
            if program.rows >= needed.rows
            and program.row_length >= needed.row_length
            and program.table >= needed.table
            and bool(program.table) == bool(needed.table)
            and _scores(program) == _scores(needed)
        ]
        return min(large_enough, key=lambda each: (each.rows * each.row_length, each.table), default=None)

    def first_decode(self, part: Sequence[Sample]) -> ProgramShape | None:
        """What is missing for the first Decode of samples that are to start together; None: nothing."""
        first = part[0]
        pages = pages_for(first.last_position(self.decode_steps) + 1, self.shapes.page_size)
        alone = self.decode([[first]], {first: pages})
        if self.programs.is_ready(alone) or any(
            covers(each, alone) for each in self.programs.ready("decode")
        ):
            return None
        rows = self.shapes.rows_of_decode(min(len(part), self.shapes.decode_rows))
        together = self.decode([list(part[:rows])], dict.fromkeys(part, pages))
        return alone if self.programs.has_failed(together) else together

    def decode(self, samples: Sequence[Sequence[Sample]], pages: dict[Sample, int]) -> ProgramShape:
        """What a Decode of these samples of each data shard needs, with so many pages each."""
        everybody = [sample for each in samples for sample in each]
        rows = self.shapes.rows_of_decode(max(map(len, samples))) * self.shapes.shards
        used = len({sample.bank for sample in everybody})
        return ProgramShape(
            step="decode",
            rows=rows,
            table=self.shapes.decode_table(max(pages[sample] for sample in everybody)),
            active=next(size for size in active_sizes(rows, self.bank_slots) if size >= used),
            top=width(max(sample.job.top for sample in everybody), self.vocab_size),
        )


def covers(program: ProgramShape, needed: ProgramShape) -> bool:
    """Whether a Decode may be run by a program that is for another one."""
    return (
        program.rows >= needed.rows
        and program.table >= needed.table
        and program.active >= needed.active
        and program.top >= needed.top
    )


def _scores(program: ProgramShape) -> Scores:
    return Scores(program.logprobs, program.top, program.named, program.draws)
