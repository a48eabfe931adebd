"""Room for the large bodies of requests that are being read or handled, shared evenly among their owners.

A body takes room for what has arrived of it, so that who sends slowly takes little. How much it may come to
is known from its headers, and counts in two ways. An owner begins a further body only while all of theirs
may come to no more than half of the room. And a body goes on only if all can still end, one after the other:
bodies of which a part is here never wait for each other for ever.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from spmd_tx.bounds import Bounds


@dataclass(eq=False)
class Place:
    """What one body has of a room."""

    owner: str
    most: int  # bytes that it may come to hold
    give_up: Callable[[], None]  # sends its sender away, who may come again
    since: float = 0.0  # when it began
    held: int = 0  # bytes
    is_whole: bool = False  # all of it is here, and it is being handled

    @property
    def missing(self) -> int:
        return self.most - self.held


@dataclass
class _Owner:
    """What all bodies of one owner have."""

    held: int = 0
    most: int = 0
    places: set[Place] = field(default_factory=set)


def can_all_end(free: int, bodies: Iterable[tuple[int, int]]) -> bool:
    """Whether bodies of (missing, held) bytes can end in some order, when each gives back what it held."""
    for missing, held in sorted(bodies):
        if missing > free:
            return False
        free += held
    return True


class BodyRoom:
    """In memory. Whatever is larger than half of it counts as half: one body never keeps out all others."""

    def __init__(self, capacity: int, patience: float, clock: Callable[[], float]) -> None:
        """After ``patience`` seconds without room, owners who have more than an even share must give way."""
        self.free = self.capacity = capacity  # bytes
        self._patience = patience
        self._clock = clock
        self._owners: dict[str, _Owner] = {}  # who hold something
        self._waiting: dict[Place, tuple[asyncio.Future[None], int]] = {}  # for so many bytes

    def place(self, owner: str, most: int, give_up: Callable[[], None]) -> Place:
        """For a body that has not begun. It must ``leave``."""
        return Place(owner, min(most, self.capacity // 2), give_up, since=self._clock())

    async def take(self, place: Place, size: int) -> None:
        """Return when there is room for so many bytes more, which are the body's from then on."""
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

    def take_now(self, place: Place, size: int) -> bool:
        """The same if there is room already, else nothing."""
        size = min(size, place.missing)
        if not self._fits(place, size):
            return False
        self._give(place, size)
        return True

    def be_whole(self, place: Place) -> None:
        """All of the body is here."""
        place.is_whole = True
        if place.held:
            self._owners[place.owner].most -= place.missing
        place.most = place.held
        self._let_in()

    def leave(self, place: Place) -> None:
        """The body is not needed any more, or will not come."""
        if place.held:
            owner = self._owners[place.owner]
            owner.places.discard(place)
            owner.held -= place.held
            owner.most -= place.most
            self.free += place.held
            place.held = 0
            if not owner.places:
                del self._owners[place.owner]
            self._let_in()

    def _fits(self, place: Place, size: int) -> bool:
        if size > self.free:
            return False
        owner = self._owners.get(place.owner)
        if not place.held and owner is not None and owner.most + place.most > self.capacity // 2:
            return False
        if place.missing <= self.free:
            return True  # it can end first, which helps all others
        bodies = [
            (each.missing, each.held)
            for owner in self._owners.values()
            for each in owner.places
            if each is not place
        ]
        return can_all_end(self.free - size, [*bodies, (place.missing - size, place.held + size)])

    def _give(self, place: Place, size: int) -> None:
        owner = self._owners.setdefault(place.owner, _Owner())
        if size and not place.held:
            owner.places.add(place)
            owner.most += place.most
        place.held += size
        owner.held += size
        self.free -= size

    def _let_in(self) -> None:
        """Those first whose owners have least; among them who came first."""
        if not self._waiting or not self.free:
            return
        for place in sorted(self._waiting, key=lambda each: self._held_by(each.owner)):
            turn, size = self._waiting[place]
            if not turn.done() and self._fits(place, size):
                self._give(place, size)
                turn.set_result(None)

    def _ask_for_room(self, place: Place) -> None:
        """Make those give way who have more than an even share, the slowest first, for one who has less."""
        share = self.capacity // len(self._owners.keys() | {each.owner for each in self._waiting})
        wanted = min(place.missing, share - self._held_by(place.owner)) - self.free
        excess = {name: owner.held - share for name, owner in self._owners.items()}
        coming = [each for owner in self._owners.values() for each in owner.places if not each.is_whole]
        for each in sorted(coming, key=self._pace):
            if wanted <= 0:
                return
            if excess[each.owner] > 0:
                excess[each.owner] -= each.held
                wanted -= each.held
                each.give_up()

    def _pace(self, place: Place) -> float:
        return place.held / max(self._clock() - place.since, 1e-3)

    def _held_by(self, owner: str) -> int:
        return self._owners[owner].held if owner in self._owners else 0


@dataclass(frozen=True)
class BodyRooms:
    """Of one server."""

    working: BodyRoom
    reading: BodyRoom  # of requests that change nothing, and take no room from the others


def make_rooms(bounds: Bounds) -> BodyRooms:
    patience, clock = bounds.body_patience_seconds, time.monotonic
    return BodyRooms(
        BodyRoom(bounds.bodies_bytes, patience, clock), BodyRoom(bounds.reading_bodies_bytes, patience, clock)
    )
