"""Whether the groups of one base model compute the same numbers."""

import asyncio
from collections.abc import Mapping
from typing import NoReturn

from spmd_tx.errors import StartError

# What all groups of a base model need alike, or weights of one would mean something else in another. The rest
# decides the last bits, which --batch-invariant promises to be the same.
OF_WEIGHTS = ("dtype", "base_dtype", "expert_weights", "expert_lora")


class SameNumbers:
    """Compares what workers tell of their numbers (worker/numerics.py)."""

    def __init__(self, leader: str | None, *, all_bits: bool) -> None:
        """``leader`` is the group that trains: others have to agree with it, whoever is ready first."""
        self._leader = leader
        self._all_bits = all_bits
        self._known: dict[str, Mapping[str, str]] = {}  # by group, in the order in which they were ready
        self._leader_is_known = asyncio.Event()

    def join(self, group: str, numerics: Mapping[str, str]) -> None:
        """Take in what a group's workers tell. Raises StartError if others of the base model differ."""
        self._known[group] = numerics
        if group == self._leader:
            self._leader_is_known.set()
        else:
            self._check(group)

    async def watch(self, group: str) -> NoReturn:
        """Wait for ever. Raises StartError when the group that trains turns out to differ."""
        await self._leader_is_known.wait()
        if group != self._leader:
            self._check(group)
        await asyncio.Event().wait()
        raise AssertionError("nobody sets this event")

    def _check(self, group: str) -> None:
        other = self._leader if self._leader in self._known else next(iter(self._known))
        assert other is not None
        own, others = self._known[group], self._known[other]
        names = own.keys() | others.keys() if self._all_bits else set(OF_WEIGHTS)
        differing = [name for name in sorted(names) if own.get(name) != others.get(name)]
        if not differing:
            return
        del self._known[group]
        values = "; ".join(
            f"{name} of {group} is {own.get(name)}, and of {other} {others.get(name)}" for name in differing
        )
        of_bits = not set(differing) & set(OF_WEIGHTS)
        why = " to the last bit, because of --batch-invariant" if of_bits else ""
        raise StartError(f"{values}; groups of one base model must compute the same numbers{why}")
