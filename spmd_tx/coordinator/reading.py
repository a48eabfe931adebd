"""Prompts on their way into the cache: a long one is read piece by piece. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from spmd_tx.coordinator.prefill import Piece, Segment
from spmd_tx.coordinator.samples import Sample, SampleJob


@dataclass(eq=False)
class Reading:
    """The common content of samples that hold their pages already and wait for what these are to hold."""

    part: list[Sample]  # the first one owns all pages that are written
    content: list[int]
    pages: list[int]
    first: int  # the next position to be read
    copies: dict[Sample, tuple[int, int]]  # (from, to): the last page, when all is read
    is_given_up: bool = False
    _known: list[tuple[int, Mapping[str, np.ndarray]]] = field(default_factory=list)  # from a position on

    @property
    def job(self) -> SampleJob:
        return self.part[0].job

    @property
    def owner(self) -> Sample:
        return self.part[0]

    @property
    def end(self) -> int:
        """The last token is the first Decode's."""
        return len(self.content) - 1

    @property
    def is_read(self) -> bool:
        """Whether all pieces are planned."""
        return self.first == self.end

    def next_piece(self, end: int) -> Piece:
        """What is read next, up to a position."""
        owner = self.owner
        return Piece(owner.shard, owner.job.version, owner.bank, self.content, self.pages, self.first, end)

    def is_scored(self, piece: Piece) -> bool:
        """Whether more is wanted of this piece than keys and values."""
        return self.job.needs_scores and piece.end > self.job.wishes.first_scored

    def give_up(self, sample: Sample) -> None:
        """One of the samples leaves before all is read; without the owner nobody has the pages."""
        self.copies.pop(sample, None)
        self.is_given_up |= sample is self.owner

    def absorb(self, segment: Segment, row: int, arrays: Mapping[str, np.ndarray], is_scored: bool) -> None:
        """Take the reply to a piece. What is wanted of the prompt is there with the last one."""
        if self.is_given_up:
            return
        mine = {name: array[row, segment.place].copy() for name, array in arrays.items()}
        if not is_scored:
            mine = {name: array for name, array in mine.items() if name == "experts"}
        self._known.append((segment.piece.first, mine))
        if segment.piece.end < self.end:
            return
        whole = {name: self._whole(name) for name in mine}
        experts = whole.pop("experts", None)
        if experts is not None and len(self.content) == len(self.job.prompt):
            self.job.prompt_experts = experts
        if is_scored:
            self.job.scores = self.job.wishes.scores(whole)

    def _whole(self, name: str) -> np.ndarray:
        """All that is known, with something for the positions before, which nothing is wanted of."""
        parts = [(first, arrays[name]) for first, arrays in self._known if name in arrays]
        before = np.zeros((parts[0][0], *parts[0][1].shape[1:]), parts[0][1].dtype)
        return np.concatenate([before, *(array for _, array in parts)])
