"""Which of the samples that could take part in a Decode do so, as far as programs are ready. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from spmd_tx.coordinator.sampling.job import Sample
from spmd_tx.coordinator.sampling.programs import SamplingPrograms, covers
from spmd_tx.coordinator.sampling.prompt_scores import width
from spmd_tx.protocol.programs import ProgramShape

Candidates = Sequence[Sequence[Sample]]  # of each data shard, oldest first


@dataclass(frozen=True)
class Choice:
    """Some of the candidates, and the program for them; None: there is none for anybody."""

    program: ProgramShape | None
    chosen: list[list[Sample]]
    waits: dict[Sample, ProgramShape] = field(default_factory=dict)  # those left out, and for which program


def choose(candidates: Candidates, pages: dict[Sample, int], sampling: SamplingPrograms) -> Choice:
    """All of them if that is possible; else as many as a program can carry, those left out longest first.

    ``pages`` are those that each will have.
    """
    everybody = [list(each) for each in candidates]
    best, programs = sampling.decode(candidates, pages), sampling.programs
    if programs.is_ready(best):
        return Choice(best, everybody)
    ready = list(programs.ready("decode"))
    larger = [program for program in ready if covers(program, best)]
    if larger:
        programs.prefer(best)
        return Choice(min(larger, key=_cost), everybody)
    program, chosen = _most(candidates, pages, sampling, ready)
    left_out = [each for shard in candidates for each in shard if not any(each in some for some in chosen)]
    is_hopeless = programs.has_failed(best)
    alone = {each: sampling.decode([[each]], pages) for each in left_out} if is_hopeless else {}
    waits = {each: alone.get(each, best) for each in left_out}
    return Choice(program, chosen, {each: wanted for each, wanted in waits.items() if wanted not in ready})


def _most(
    candidates: Candidates, pages: dict[Sample, int], sampling: SamplingPrograms, ready: list[ProgramShape]
) -> tuple[ProgramShape | None, list[list[Sample]]]:
    """The program that carries the one who was left out longest, and most others with it."""
    best: tuple[ProgramShape | None, list[list[Sample]]] = None, [[] for _ in candidates]
    best_rank: tuple[float, ...] = (float("-inf"),)
    for program in ready:
        carried = _carried(candidates, pages, sampling, program)
        served = [sample.decode for shard in carried for sample in shard]
        if served:
            rank = (-min(served), len(served), *(-each for each in _cost(program)))
            if rank > best_rank:
                best, best_rank = (program, carried), rank
    return best


def _carried(
    candidates: Candidates, pages: dict[Sample, int], sampling: SamplingPrograms, program: ProgramShape
) -> list[list[Sample]]:
    banks: set[int] = set()
    chosen: set[Sample] = set()
    counts = [0] * len(candidates)
    numbered = [(number, sample) for number, shard in enumerate(candidates) for sample in shard]
    for number, sample in sorted(numbered, key=lambda each: (each[1].decode, each[1].age)):
        fits = pages[sample] <= program.table and width(sample.job.top, sampling.vocab_size) <= program.top
        is_place = counts[number] < program.rows // sampling.shapes.shards
        if fits and is_place and len(banks | {sample.bank}) <= program.active:
            banks.add(sample.bank)
            counts[number] += 1
            chosen.add(sample)
    return [[sample for sample in shard if sample in chosen] for shard in candidates]


def _cost(program: ProgramShape) -> tuple[int, ...]:
    return program.rows * program.table, program.active, program.top
