"""The tokens that one Decode drew for one sample, in the Decode's reply."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmd_tx.coordinator.sampling.job import Sample
from spmd_tx.coordinator.sampling.speculation.guess import Guess
from spmd_tx.coordinator.wire.sampling_protobuf import TopLogprobs
from spmd_tx.errors import MeshError
from spmd_tx.protocol.reports import Reply

OF_ALL = {"tokens", "logprobs"}
TOPS = "top_tokens", "top_logprobs"


class DrawnColumns:
    """Holds what a Decode's reply has for each of its columns, as lists."""

    def __init__(self, reply: Reply) -> None:
        self.arrays = reply.arrays
        self.has_more = reply.arrays.keys() > OF_ALL
        self.tokens: list[list[int]] = reply.arrays["tokens"].T.tolist()
        self.logprobs: list[list[float]] = reply.arrays["logprobs"].T.tolist()


@dataclass(slots=True)
class DrawnTokens:
    """Locates the tokens of one sample in a Decode's reply."""

    sample: Sample
    column: int
    skip: int  # steps that were fed known tokens
    count: int  # tokens, unless it stops earlier
    masks: Sequence[np.ndarray] = ()  # of the steps in which no token was known
    refusals: int = 0  # of the sample when this was sent; if there are more, these tokens are dropped
    guess: Guess | None = None

    @classmethod
    def sent(cls, sample: Sample, decode: int, first_row: int, row: int, steps: int) -> "DrawnTokens":
        """Note that a Decode has a sample: in a row of its data shard, which begins at ``first_row``."""
        fed, guide = min(steps, sample.behind), sample.guide
        count = min(steps - fed, sample.undecided if guide is None else sample.draws_left)
        is_masked = guide is not None and sample.is_masked
        masks = guide.likely_masks if guide is not None and is_masked else ()
        # The device knows of so many tokens, and no more; or how many there are is not known.
        guess, sample.guess, sample.expected = sample.guess, None, []
        sample.begins_anew = is_masked or guess is not None
        sample.behind -= fed
        sample.outstanding += count
        sample.decode, sample.row, sample.placed = decode, row, len(sample.pages)
        return cls(sample, first_row + row, fed, count, masks, sample.refusals, guess)

    def take(self, columns: DrawnColumns) -> bool:
        """Give the sample its tokens, unless they are of no use; return whether it got any.

        Raises MeshError if there are too few of a sample that goes on.
        """
        sample, job = self.sample, self.sample.job
        if self.refusals != sample.refusals:  # of a token before these
            return False
        sample.outstanding -= self.count
        if job.is_over or sample.stop_reason is not None or not self.count:
            return False
        drawn, known, logprobs = self._places(columns)
        guide, drawn_count = sample.guide, len(known)
        if guide is not None:
            redrawn = columns.arrays["redrawn"][drawn].tolist() if self.masks else ()
            known = known[: guide.take(known, self.masks, redrawn)]
            logprobs = logprobs[: len(known)]
        experts = top = None
        if columns.has_more:
            experts, top = self._more(columns.arrays, _first(drawn, len(known)))
        sample.extend(known, logprobs, experts, top)
        job.passed_over = 0
        if sample.stop_reason is not None:
            return True
        if len(known) < drawn_count:
            sample.drop_draws(has_read=len(known) + 1 < drawn_count)
        elif drawn_count < self.count:
            raise MeshError(
                f"a Decode drew {len(known)} of {self.count} tokens for {job.request_id} without a stop token"
            )
        return True

    def _more(
        self, arrays: Mapping[str, np.ndarray], places: tuple[Any, Any]
    ) -> tuple[np.ndarray | None, TopLogprobs | None]:
        """Return the experts of the sample's tokens, and the likeliest ones in their places, if any."""
        job = self.sample.job
        if "drafts" in arrays and not self.sample.outstanding:
            self.sample.expected = arrays["drafts"][places][-1:].tolist()
        tops = [arrays[name][places][:, : job.top] for name in TOPS if job.top and name in arrays]
        experts = arrays["experts"][places] if "experts" in arrays else None
        return experts, TopLogprobs(*tops) if tops else None

    def _places(self, columns: DrawnColumns) -> tuple[Any, list[int], list[float]]:
        """Return where in a reply's arrays the sample's tokens are, the tokens, and their logprobs.

        A place is in which steps, and in which columns.
        """
        if self.guess is None:
            steps = slice(self.skip, self.skip + self.count)
            tokens, logprobs = columns.tokens[self.column][steps], columns.logprobs[self.column][steps]
            if tokens and tokens[-1] < 0:  # it ended before
                count = sum(token >= 0 for token in tokens)
                tokens, logprobs = tokens[:count], logprobs[:count]
            return (steps, self.column), tokens, logprobs
        own_KF = columns.arrays["tokens"][:, self.column : self.column + 1 + self.guess.followers]
        self.guess.note(own_KF)
        rows, followers = np.nonzero(own_KF >= 0)
        drawn = rows, self.column + followers
        return drawn, columns.arrays["tokens"][drawn].tolist(), columns.arrays["logprobs"][drawn].tolist()


def _first(places: tuple[Any, Any], count: int) -> tuple[Any, Any]:
    steps, columns = places
    if isinstance(steps, slice):
        return slice(steps.start, steps.start + count), columns
    return steps[:count], columns[:count]
