"""Chooses the samples of a Decode, as far as compiled programs allow. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spmd_tx.coordinator.sampling.guesses import Guesses
from spmd_tx.coordinator.sampling.job import Sample
from spmd_tx.coordinator.sampling.programs import SamplingPrograms
from spmd_tx.coordinator.sampling.request.prompt_scores import width
from spmd_tx.coordinator.sampling.speculation.guess import Guess
from spmd_tx.protocol.programs import ProgramShape

Candidates = Sequence[Sequence[Sample]]  # of each data shard, oldest first


@dataclass(frozen=True)
class DecodeChoice:
    """Holds the chosen candidates and their program."""

    program: ProgramShape | None  # None: no program is ready for any of them
    chosen: list[list[Sample]]
    left_out: Mapping[Sample, ProgramShape] = field(default_factory=dict)  # by the program they wait for
    guesses: Mapping[Sample, Guess] = field(default_factory=dict)  # of those that speculate

    def hand_out_guesses(self) -> None:
        """Tell the chosen samples how they speculate in the next Decode."""
        for sample in (sample for samples in self.chosen for sample in samples):
            sample.guess = self.guesses.get(sample)


def able_together(candidates: Candidates, sampling: SamplingPrograms) -> Candidates:
    """Leave out candidates that cannot be in one Decode with the one left out longest.

    A lonely request has Decodes of its own. A batch-invariant Decode takes those that want as many of the
    likeliest tokens, and those with a grammar or those without: each has its own program.
    """
    everybody = [sample for samples in candidates for sample in samples]
    if not everybody:
        return candidates
    if not sampling.shapes.batch_invariant and not any(sample.job.is_lonely for sample in everybody):
        return candidates
    first = min(everybody, key=lambda sample: (sample.decode, sample.age))
    alone = sampling.decode([[first]])

    def may_join(sample: Sample) -> bool:
        if sample.job is not first.job and (sample.job.is_lonely or first.job.is_lonely):
            return False
        return not sampling.shapes.batch_invariant or sampling.decode([[sample]]) == alone

    return [[sample for sample in samples if may_join(sample)] for samples in candidates]


def choose(candidates: Candidates, sampling: SamplingPrograms) -> DecodeChoice:
    """Choose all candidates if a ready program fits them, else as many as one carries, oldest wait first."""
    everybody = [list(each) for each in candidates]
    best, programs = sampling.decode(candidates), sampling.programs
    if programs.is_ready(best):
        return DecodeChoice(best, everybody)
    ready = [program for program in programs.ready("decode") if not program.chunk]
    larger = [program for program in ready if sampling.covers(program, best)]
    if larger:
        programs.prefer(best)
        return DecodeChoice(min(larger, key=_cost), everybody)
    if sampling.shapes.batch_invariant:
        nobody: list[list[Sample]] = [[] for _ in candidates]
        return DecodeChoice(None, nobody, {each: best for shard in candidates for each in shard})
    program, chosen = _most(candidates, sampling, ready)
    others = [each for shard in candidates for each in shard if not any(each in some for some in chosen)]
    is_hopeless = programs.has_failed(best)
    wanted = {each: sampling.decode([[each]]) if is_hopeless else best for each in others}
    return DecodeChoice(program, chosen, {each: wanted[each] for each in others if wanted[each] not in ready})


def speculate(
    candidates: Candidates, sampling: SamplingPrograms, guesses: Guesses, *, is_known: bool
) -> DecodeChoice | None:
    """Choose all candidates and what some of them are likely to draw; None: that is of no use.

    ``is_known``: nothing is outstanding. Otherwise the choice is what may come of waiting for it.
    """
    made = guesses.make(candidates, is_known=is_known)
    if made is None:
        return None
    program = sampling.speculative(candidates, made.rows)
    if not sampling.programs.is_ready(program):
        sampling.programs.prefer(program)
        return None
    return DecodeChoice(program, [list(each) for each in candidates], guesses=made.guesses)


def _most(
    candidates: Candidates, sampling: SamplingPrograms, ready: list[ProgramShape]
) -> tuple[ProgramShape | None, list[list[Sample]]]:
    """Return the program that carries the sample left out longest, and as many others as possible."""
    best: tuple[ProgramShape | None, list[list[Sample]]] = None, [[] for _ in candidates]
    best_rank: tuple[float, ...] = (float("-inf"),)
    for program in ready:
        carried = _carried(candidates, sampling, program)
        served = [sample.decode for shard in carried for sample in shard]
        if served:
            rank = (-min(served), len(served), *(-each for each in _cost(program)))
            if rank > best_rank:
                best, best_rank = (program, carried), rank
    return best


def _carried(candidates: Candidates, sampling: SamplingPrograms, program: ProgramShape) -> list[list[Sample]]:
    banks: set[int] = set()
    chosen: set[Sample] = set()
    counts = [0] * len(candidates)
    numbered = [(number, sample) for number, shard in enumerate(candidates) for sample in shard]
    for number, sample in sorted(numbered, key=lambda each: (each[1].decode, each[1].age)):
        fits = width(sample.job.top, sampling.vocab_size) <= program.top
        fits = fits and (program.masked or not sampling.needs_masks(sample))
        is_place = counts[number] < program.rows // sampling.shapes.shards
        if fits and is_place and len(banks | {sample.bank}) <= program.active:
            banks.add(sample.bank)
            counts[number] += 1
            chosen.add(sample)
    return [[sample for sample in shard if sample in chosen] for shard in candidates]


def _cost(program: ProgramShape) -> tuple[int, ...]:
    return program.rows, program.active, program.top, program.masked


def least_steps(candidates: Candidates) -> int:
    """Return how many steps the rows with the fewest tokens left need.

    Those with masks need as many as are likely to be allowed, in the row with the most of them.
    """
    everybody = [sample for samples in candidates for sample in samples]
    masked = [sample.steps_wanted for sample in everybody if sample.guide is not None and sample.is_masked]
    least = [sample.steps_left for sample in everybody if sample.guide is None or not sample.is_masked]
    return min([*least, max(masked)] if masked else least)
