"""What is likely to follow a sample, and how often that was right. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spmd_tx.coordinator.runtime import metrics
from spmd_tx.protocol.commands import MOST_FOLLOWERS, REJECTED

UNPROVED = 0.1  # how likely it is that a draft is right, before any was seen
TRAINED = 0.7  # the same of one that the model makes
EVIDENCE = 2, 8  # drafts that count as much as all that was known before: nothing yet, and much


class Record:
    """Keeps how many of a sample's drafts were right, as a running average.

    A sample has the record of its prompt as its parent, and that one has the record of its session.
    """

    def __init__(self, parent: "Record | None" = None, acceptance: float = UNPROVED) -> None:
        """Expect what the parent has seen, and tell it what comes of this one's drafts."""
        self._parent = parent
        self.acceptance, self._seen = (acceptance, 0) if parent is None else (parent.acceptance, parent._seen)

    def note(self, right: int, wrong: int) -> None:
        """Take in that so many drafts were right and wrong, without those behind a wrong one."""
        drafts = right + wrong
        if drafts:
            least, most = EVIDENCE
            self.acceptance += (right - drafts * self.acceptance) / (drafts + min(least + self._seen, most))
            self._seen += drafts
            if self._parent is not None:
                self._parent.note(right, wrong)


@dataclass(frozen=True)
class Guess:
    """Holds what the followers of a sample's row read."""

    drafts: list[int]  # those that are known
    followers: int
    record: Record
    most: int = MOST_FOLLOWERS  # followers
    slots: Sequence[int] = ()  # of the followers' states, if they have their own

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
