"""A memory budget for large request bodies that are being read or handled, shared evenly among owners.

A body takes room for what has arrived, so a slow sender takes little. Its headers tell its full size, which
counts in two ways. An owner may begin another body only while the full sizes of theirs add up to at most half
of the room. And a body continues only if all bodies can still end, one after the other (the banker's
algorithm), so partly received bodies never deadlock.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spmd_tx.bounds import Bounds


@dataclass(eq=False)
class BodyShare:
    """Holds one body's share of a room."""

    owner: str
    most: int  # bytes that it may hold in the end
    give_up: Callable[[], None]  # refuses it; its sender may try again
    since: float = 0.0  # when it began
    held: int = 0  # bytes
    is_whole: bool = False  # it has arrived and is being handled

    @property
    def missing(self) -> int:
        return self.most - self.held


def can_all_end(free: int, bodies: Iterable[tuple[int, int]]) -> bool:
    """Return whether bodies of (missing, held) bytes can end in some order, each freeing what it held."""
    for missing, held in sorted(bodies):
        if missing > free:
            return False
        free += held
    return True


class BodyRoom:
    """Shares room among bodies. One larger than half of it counts as half, so others still fit."""

    def __init__(self, capacity: int, patience: float, clock: Callable[[], float]) -> None:
        """After ``patience`` seconds (by ``clock``) without room, owners above an even share must yield."""
        self.free = self.capacity = capacity  # bytes
        self._patience = patience
        self._clock = clock
        self._holding: set[BodyShare] = set()
        self._most: Counter[str] = Counter()  # full sizes of those, by owner
        self._waiting: dict[BodyShare, tuple[asyncio.Future[None], int]] = {}  # with the bytes they wait for

    def place(self, owner: str, most: int, give_up: Callable[[], None]) -> BodyShare:
        """Make a place for a body of at most ``most`` bytes, which must ``leave`` in the end."""
        return BodyShare(owner, min(most, self.capacity // 2), give_up, since=self._clock())

    async def take(self, place: BodyShare, size: int) -> None:
        """Wait for room for ``size`` more bytes of the body, and take it."""
        if self.take_now(place, size):
            return
        size = min(size, place.missing)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[place] = turn, size
        try:
            while not (await asyncio.wait([turn], timeout=self._patience))[0]:
                self._ask_for_room(place)
        finally:
            self._waiting.pop(place, None)

    def take_now(self, place: BodyShare, size: int) -> bool:
        """Take room if there is enough already; return whether there was."""
        size = min(size, place.missing)
        if not self._fits(place, size):
            return False
        self._give(place, size)
        return True

    def be_whole(self, place: BodyShare) -> None:
        """Note that the whole body has arrived."""
        place.is_whole = True
        if place.held:
            self._most[place.owner] -= place.missing
        place.most = place.held
        self._let_in()

    def leave(self, place: BodyShare) -> None:
        """Give back the room of a body that was handled or refused."""
        if place.held:
            self._holding.discard(place)
            self._most[place.owner] -= place.most
            if not self._most[place.owner]:
                del self._most[place.owner]
            self.free += place.held
            place.held = 0
            self._let_in()

    def _fits(self, place: BodyShare, size: int) -> bool:
        if size > self.free:
            return False
        if not place.held and self._most[place.owner] + place.most > self.capacity // 2:
            return False
        if place.missing <= self.free:
            return True  # it can end first and give back its room
        bodies = [(each.missing, each.held) for each in self._holding if each is not place]
        return can_all_end(self.free - size, [*bodies, (place.missing - size, place.held + size)])

    def _give(self, place: BodyShare, size: int) -> None:
        if size and not place.held:
            self._holding.add(place)
            self._most[place.owner] += place.most
        place.held += size
        self.free -= size

    def _let_in(self) -> None:
        """Give room to those who wait, first to those whose owners hold least, then in order of arrival."""
        if not self._waiting or not self.free:
            return
        held = self._held_by_owner()
        for place in sorted(self._waiting, key=lambda each: held[each.owner]):
            turn, size = self._waiting[place]
            if not turn.done() and self._fits(place, size):
                self._give(place, size)
                turn.set_result(None)

    def _ask_for_room(self, place: BodyShare) -> None:
        """Make bodies of owners with more than an even share yield, slowest first, to an owner with less."""
        held = self._held_by_owner()
        share = self.capacity // len(held.keys() | {each.owner for each in self._waiting})
        shortage = min(place.missing, share - held[place.owner]) - self.free
        excess = {owner: size - share for owner, size in held.items()}
        coming = [each for each in self._holding if not each.is_whole]
        for each in sorted(coming, key=self._pace):
            if shortage <= 0:
                return
            if excess[each.owner] > 0:
                excess[each.owner] -= each.held
                shortage -= each.held
                each.give_up()

    def _pace(self, place: BodyShare) -> float:
        return place.held / max(self._clock() - place.since, 1e-3)

    def _held_by_owner(self) -> Counter[str]:
        held = Counter[str]()
        for each in self._holding:
            held[each.owner] += each.held
        return held


@dataclass(frozen=True)
class BodyRooms:
    """Holds the rooms of one server."""

    working: BodyRoom
    reading: BodyRoom  # for requests that change nothing: they take no room from others
    answers: BodyRoom  # for results of OpenAI's API while their answers are written and sent


def make_rooms(bounds: Bounds) -> BodyRooms:
    patience, clock = bounds.body_patience_seconds, time.monotonic
    sizes = (bounds.bodies_bytes, bounds.reading_bodies_bytes, bounds.answers_bytes)
    return BodyRooms(*(BodyRoom(size, patience, clock) for size in sizes))
