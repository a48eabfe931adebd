"""Decides which samples of a Decode speculate, and how many rows follow each. Pure.

Rows that a program has beside those of the samples cost nothing. A larger program costs more, so it must be
likely to draw as many more tokens. What is likely follows from how many drafts of a sample were right. Those
that no row reads are compared with what is drawn, too, so that drafts prove themselves before they cost
anything. Those that the model makes itself need no proof: it has been trained for that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from spmd_tx.coordinator.sampling.job import Sample
from spmd_tx.coordinator.sampling.shapes import FEW_ROWS, SamplingShapes
from spmd_tx.coordinator.sampling.speculation.guess import Guess, Record
from spmd_tx.coordinator.sampling.speculation.texts import MOST_COMPARED, DraftTexts, SessionTexts
from spmd_tx.protocol.commands import DRAFT_TOKENS, MOST_FOLLOWERS

COST_OF_ROW, CPU_COST_OF_ROW = 0.01, 0.08  # of a step, in steps that have no rows
CPU_COST_OF_TOKEN = 0.13e-3  # the same of each token that a row attends to, whose row reads it alone
LEAST_GAIN = 1.15  # times the tokens per second; the next Decode cannot be sent before the last one's reply


@dataclass(frozen=True)
class SpeculativeRows:
    """Says what rows of a Decode follow samples."""

    rows: int  # of each data shard
    guesses: dict[Sample, Guess]


@dataclass
class _Known:
    """What is known of a sample."""

    texts: DraftTexts
    record: Record
    of_model: Record  # of drafts that the model makes
    drafts: Sequence[int] = ()  # which no row has read, of tokens from ``first`` on
    first: int = 0

    def look(self, sample: Sample) -> list[int]:
        """Return what is likely to follow, and judge what was found the last time by what has come since."""
        drawn = sample.tokens[self.first : self.first + len(self.drafts)]
        right = _alike(drawn, self.drafts)
        self.record.note(right, int(right < len(drawn)))
        self.texts.put(_owner(sample), sample.tokens)
        self.texts.read()
        drafts = [] if sample.behind else self.texts.find(_tail(sample), DRAFT_TOKENS)
        self.drafts, self.first = drafts, len(sample.tokens)
        return drafts


_Able = tuple[Guess, Sample]  # with drafts, and no followers yet


class Guesses:
    """Knows what samples of one batch have drawn, and what has come of guesses."""

    def __init__(self, shapes: SamplingShapes) -> None:
        self._shapes = shapes
        self._texts = SessionTexts()
        self._known = WeakKeyDictionary[Sample, _Known]()
        self._hoped: list[Record] = []  # of samples whose outstanding tokens are waited for

    def ended(self, sample: Sample) -> None:
        """Note a sample that has all of its tokens."""
        if self._shapes.speculates and _may_speculate(sample):
            self._know(sample).texts.put(_owner(sample), sample.tokens)

    def make(self, candidates: Sequence[Sequence[Sample]], *, is_known: bool) -> SpeculativeRows | None:
        """Return the rows that follow the samples of each data shard; None: they are not worth it.

        With ``is_known`` all tokens are known; else those that are known say whether to wait for the others.
        """
        if not self._shapes.speculates:
            return None
        hoped, self._hoped = self._hoped, []
        best = self._best(candidates)
        if best is None and is_known:  # the wait was in vain
            for record in hoped:
                record.note(0, 1)
        elif best is not None and not is_known:
            self._hoped = [guess.record for guess in best.guesses.values()]
        elif best is not None:
            for sample, guess in best.guesses.items():
                if guess.record is self._know(sample).record:  # their followers tell
                    self._know(sample).drafts = ()
        return best

    def _best(self, candidates: Sequence[Sequence[Sample]]) -> SpeculativeRows | None:
        most = max(map(len, candidates))
        sizes = [size for size in self._sizes() if size > most]
        everybody = [sample for samples in candidates for sample in samples]
        if not sizes or any(sample.guide is not None for sample in everybody):
            return None
        able = [list(self._able(samples)) for samples in candidates]
        tokens = sum(sample.position for sample in everybody)
        usual = self._cost(self._shapes.rows_of_decode(most), tokens)
        best, best_rate = None, LEAST_GAIN * len(everybody) / usual
        for size in sizes:
            guesses = dict[Sample, Guess]()
            for some, samples in zip(able, candidates, strict=True):
                guesses |= _deal(some, size - len(samples))
            ahead = sum(guess.followers * sample.position for sample, guess in guesses.items())
            cost = self._cost(size, tokens + ahead)
            cost *= 1 if self._shapes.decodes_speculate else 1 + self._shapes.draft_cost
            rate = (len(everybody) + sum(guess.gain for guess in guesses.values())) / cost
            if rate > best_rate:
                best, best_rate = SpeculativeRows(size, guesses), rate
        return best

    def _sizes(self) -> list[int]:
        block = self._shapes.decode_block
        return [block] if block else [size for size in self._shapes.decode_sizes if size <= FEW_ROWS]

    def _cost(self, rows: int, tokens: int) -> float:
        """Return the cost of a step whose rows attend to so many tokens together."""
        if not self._shapes.on_cpu:
            return 1 + COST_OF_ROW * rows
        return 1 + CPU_COST_OF_ROW * rows + CPU_COST_OF_TOKEN * tokens

    def _know(self, sample: Sample) -> _Known:
        known = self._known.get(sample)
        if known is None:
            job = sample.job
            texts = self._texts.of(job.session or job.request_id, job.prompt)
            known = self._known[sample] = _Known(texts, Record(texts.record), Record(texts.session.of_model))
        return known

    def _able(self, samples: Iterable[Sample]) -> Iterable[_Able]:
        """Yield those samples of which something is known that may follow."""
        for sample in filter(_may_speculate, samples):
            known = self._know(sample)
            drafts = known.look(sample)
            best = Guess(drafts, 0, known.record, min(MOST_FOLLOWERS, len(drafts)))
            if self._shapes.draft_cost and not sample.behind:
                its_own = Guess(sample.expected, 0, known.of_model, most=1)
                best = best if drafts and best.record.acceptance >= its_own.record.acceptance else its_own
            if best.most:
                yield best, sample


def _alike(drawn: Sequence[int], drafts: Sequence[int]) -> int:
    """Return how many tokens are as expected, before the first that is not."""
    pairs = enumerate(zip(drawn, drafts, strict=False))
    return next((count for count, (token, draft) in pairs if token != draft), len(drawn))


def _may_speculate(sample: Sample) -> bool:
    """Whether a sample may speculate at all: not within a grammar, and not behind images."""
    return sample.guide is None and not sample.job.images and sample.job.wants_tokens


def _owner(sample: Sample) -> tuple[str, int]:
    return sample.job.request_id, sample.index


def _tail(sample: Sample) -> list[int]:
    """Return the last tokens that are known."""
    return [*sample.job.prompt[-MOST_COMPARED:], *sample.tokens[-MOST_COMPARED:]][-MOST_COMPARED:]


def _deal(able: Sequence[_Able], spare: int) -> dict[Sample, Guess]:
    """Give each spare row to the sample of which it is likeliest to count."""
    counts = [0] * len(able)
    most = [guess.most for guess, _ in able]
    for _ in range(spare):
        free = [number for number, count in enumerate(counts) if count < most[number]]
        if not free:
            break
        counts[max(free, key=lambda number: able[number][0].record.acceptance ** (counts[number] + 1))] += 1
    return {
        sample: replace(guess, followers=count)
        for (guess, sample), count in zip(able, counts, strict=True)
        if count
    }
