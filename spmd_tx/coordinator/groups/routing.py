"""Chooses the group that draws a sample, by the seconds that it would take there. Pure."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from spmd_tx.coordinator.scheduler.sample_offer import SampleOffer

KEPT_TOGETHER_SECONDS = 10.0  # samples that begin alike, which find their prompt in one cache
MOST_BEGINNINGS = 4096  # that are remembered


RoutedBecause = Literal["only", "waiting", "cached", "together"]


class GroupChoice(NamedTuple):
    """Describes a group that may take a sample."""

    trains: bool
    is_ready: bool
    offer: SampleOffer


def chosen(choices: Sequence[GroupChoice]) -> int:
    """Return the index of the group for a sample: of those that may take it, the first that would draw."""
    return min(_candidates(choices), key=lambda index: choices[index].offer.seconds)


def _candidates(choices: Sequence[GroupChoice]) -> list[int]:
    """Return the indices of the groups that may take a sample.

    A group that trains samples only while no other one is ready. Where none is ready, the sample waits for
    one that only samples.
    """
    ranks = [(not choice.is_ready, choice.trains) for choice in choices]
    return [index for index, rank in enumerate(ranks) if rank == min(ranks)]


def why(choices: Sequence[GroupChoice], index: int) -> RoutedBecause:
    """Say what has made a group the first: its line, or its prefix cache."""
    if len(_candidates(choices)) == 1:
        return "only"
    most = max(choice.offer.unread for choice in choices)
    without_caches = [choice._replace(offer=replace(choice.offer, unread=most)) for choice in choices]
    return "waiting" if chosen(without_caches) == index else "cached"


class Beginnings:
    """Remembers where samples went of late, by how they begin. Their prompt may not be in the cache yet."""

    def __init__(self) -> None:
        self._last: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # group, and when

    def note(self, beginning: bytes, group: str, now: float) -> None:
        self._last[beginning] = group, now
        self._last.move_to_end(beginning)
        while len(self._last) > MOST_BEGINNINGS:
            self._last.popitem(last=False)

    def group_of(self, beginning: bytes, now: float) -> str | None:
        group, noted_at = self._last.get(beginning, (None, now))
        return group if now - noted_at < KEPT_TOGETHER_SECONDS else None
