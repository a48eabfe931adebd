"""Chooses the replica and the number of a worker that has joined without one. Pure."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple


class ReplicaPlaces(NamedTuple):
    """Describes the workers that a replica lacks, and where the others are."""

    absent: Sequence[int]  # their numbers, ascending
    hosts: Collection[str]  # of the agents that are here


class AgentPlace(NamedTuple):
    """Names a worker of a group."""

    group: str
    process: int


def place_on(host: str, replicas: Mapping[str, ReplicaPlaces]) -> AgentPlace | None:
    """Return the place for an agent of ``host``; None: there is no free one.

    A replica that has begun is completed first, if possible one of the same host; else the first is begun.
    """
    free = [(name, places) for name, places in replicas.items() if places.absent]
    if not free:
        return None
    begun = [each for each in free if each[1].hosts]
    beside = [each for each in begun if host in each[1].hosts]
    name, places = min(beside or begun or free[:1], key=lambda each: len(each[1].absent))
    return AgentPlace(name, places.absent[0])
