"""What is likely to follow a sample, and how often that was right. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spmd_tx.coordinator.runtime import metrics
from spmd_tx.protocol.commands import REJECTED

LIKELY = 0.7  # that a draft is right, before any is known
EVIDENCE = 8  # drafts that count as much as all that was known before
RECOVERY = 0.01  # of the way back to what is likely, with each Decode that has no followers


class Record:
    """Keeps how many of a sample's drafts were right, as a running average.

    A sample has the record of its prompt as its parent, and that one has the record of its session.
    """

    def __init__(self, parent: "Record | None" = None) -> None:
        """Expect what the parent has seen, and tell it what comes of this one's drafts."""
        self._parent = parent
        self.acceptance = LIKELY if parent is None else parent.acceptance
        self.is_untried = parent is None or parent.is_untried

    def note(self, right: int, wrong: int) -> None:
        """Take in a Decode in which so many drafts were right and wrong, without those behind a wrong one."""
        drafts = right + wrong
        if drafts:
            self.acceptance += (right - drafts * self.acceptance) / (drafts + EVIDENCE)
            self.is_untried = False
            if self._parent is not None:
                self._parent.note(right, wrong)

    def pass_by(self) -> None:
        """Forget a little, so that it is tried again some day."""
        self.acceptance += RECOVERY * (LIKELY - self.acceptance)


@dataclass(frozen=True)
class Guess:
    """Holds what the followers of a sample's row read."""

    drafts: list[int]
    followers: int
    record: Record
    slots: Sequence[int] = ()  # of the followers' states, of models that keep some

    def within(self, free: Sequence[int]) -> "Guess | None":
        """Return the guess with as many followers as there are slots for their states; None: with none."""
        count = min(self.followers, len(free))
        return replace(self, followers=count, slots=free[:count]) if count else None

    @property
    def gain(self) -> float:
        """How many tokens more a step is likely to draw."""
        return sum(self.record.acceptance**count for count in range(1, self.followers + 1))

    def note(self, tokens_KF: np.ndarray) -> None:
        """Take in what was drawn in each step by the row, in the first column, and its followers."""
        right_KF, wrong_KF = tokens_KF[:, 1:] >= 0, tokens_KF[:, 1:] == REJECTED
        self.record.note(int(right_KF.sum()), int(wrong_KF.any(axis=1).sum()))
        metrics.DRAFTED_TOKENS.labels(metrics.group()).inc(int((right_KF | wrong_KF).sum()))
        metrics.ACCEPTED_TOKENS.labels(metrics.group()).inc(int(right_KF.sum()))
