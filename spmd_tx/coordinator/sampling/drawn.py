"""The tokens that one Decode drew for one sample, in the Decode's reply."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmd_tx.coordinator.sampling.job import Sample
from spmd_tx.coordinator.sampling.speculation.guess import Guess
from spmd_tx.coordinator.wire.sampling_protobuf import TopLogprobs
from spmd_tx.errors import MeshError
from spmd_tx.protocol.reports import Reply


@dataclass(frozen=True)
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
        fed = min(steps, sample.behind)
        count = min(steps - fed, sample.draws_left)
        masks = sample.guide.likely_masks if sample.guide is not None and sample.is_masked else ()
        # The device knows of so many tokens, and no more; or how many there are is not known.
        guess, sample.guess = sample.guess, None
        sample.begins_anew = sample.is_masked or guess is not None
        sample.behind -= fed
        sample.outstanding += count
        sample.decode, sample.row, sample.placed = decode, row, len(sample.pages)
        return cls(sample, first_row + row, fed, count, masks, sample.refusals, guess)

    @property
    def is_dropped(self) -> bool:
        """Whether a token before these was refused."""
        return self.refusals != self.sample.refusals

    def extend(self, reply: Reply) -> None:
        """Give the sample its tokens. Raises MeshError if there are too few of a sample that goes on."""
        job, arrays = self.sample.job, reply.arrays
        drawn = self._places(arrays["tokens"])
        known = [token for token in arrays["tokens"][drawn].tolist() if token >= 0]
        guide, drawn_count = self.sample.guide, len(known)
        if guide is not None:
            redrawn = arrays["redrawn"][drawn].tolist() if self.masks else ()
            known = known[: guide.take(known, self.masks, redrawn)]
        drawn = _first(drawn, len(known))
        experts = arrays.get("experts")
        tops = [arrays.get(name) for name in ("top_tokens", "top_logprobs")]
        top = [array[drawn][:, : job.top] for array in tops if array is not None]
        self.sample.extend(
            known,
            arrays["logprobs"][drawn].tolist(),
            None if experts is None else experts[drawn],
            TopLogprobs(*top) if top else None,
        )
        job.passed_over = 0
        if self.sample.stop_reason is not None:
            return
        if len(known) < drawn_count:
            self.sample.drop_draws(has_read=len(known) + 1 < drawn_count)
        elif drawn_count < self.count:
            raise MeshError(
                f"a Decode drew {len(known)} of {self.count} tokens for {job.request_id} without a stop token"
            )

    def _places(self, tokens_KB: np.ndarray) -> tuple[Any, Any]:
        """Return where in a reply's arrays the sample's tokens are: in which steps, and in which columns."""
        if self.guess is None:
            return slice(self.skip, self.skip + self.count), self.column
        own_KF = tokens_KB[:, self.column : self.column + 1 + self.guess.followers]
        self.guess.note(own_KF)
        steps, columns = np.nonzero(own_KF >= 0)
        return steps, self.column + columns


def _first(places: tuple[Any, Any], count: int) -> tuple[Any, Any]:
    steps, columns = places
    if isinstance(steps, slice):
        return slice(steps.start, steps.start + count), columns
    return steps[:count], columns[:count]
