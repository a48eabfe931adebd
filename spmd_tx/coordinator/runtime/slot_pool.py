"""Numbered slots and what they hold. The least recently used content leaves first. Pure.

Nothing is moved here: the caller makes the commands that move contents into slots and out of them.
"""

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Content = TypeVar("Content", bound=Hashable)


@dataclass
class _Slot(Generic[Content]):
    content: Content | None = None
    used_at: int = 0
    users: int = 0
    users_since: int = 0  # when it last got its first user
    turn: int = 0  # what is left of the content's turn


class SlotPool(Generic[Content]):
    """Assigns slots to contents. A slot with users keeps its content.

    Two kinds of turns let contents share too few slots: a content may stay until it has spent its turn, and
    users of different contents may be limited in number, so that the one used for longest gets no new users.
    """

    def __init__(
        self, count: int, *, shared: Collection[int] | None = None, most_used: int | None = None
    ) -> None:
        """Number the slots from 0. At most ``most_used`` of the ``shared`` ones have users at a time.

        Without these arguments any number of slots may have users.
        """
        self._slots = [_Slot[Content]() for _ in range(count)]
        self._shared = range(count) if shared is None else shared
        self._most_used = count if most_used is None else most_used
        self._slot_of: dict[Content, int] = {}
        self._closed: set[int] = set()  # to new users, until the next round
        self._time = 0

    def __len__(self) -> int:
        return len(self._slots)

    def contents(self) -> Collection[Content]:
        return self._slot_of.keys()

    def slot_of(self, content: Content) -> int | None:
        """Return the slot of a content; None: it has none."""
        return self._slot_of.get(content)

    def content_of(self, slot: int) -> Content | None:
        """Return what a slot holds; None: it is empty."""
        return self._slots[slot].content

    def next_slot(self, claim: Callable[[Content], Any] = lambda content: ()) -> int | None:
        """Return the slot to use next: an empty one, or that of the content to leave. None: all stay.

        ``claim`` returns how much a content needs its slot: None if it stays, else any sort key. The one with
        the least claim leaves, and of equals the least recently used.
        """
        ranked = []
        for number, slot in enumerate(self._slots):
            if slot.users:
                continue
            if slot.content is None:
                return number
            if (rank := claim(slot.content)) is not None:
                ranked.append((rank, slot.used_at, number))
        return min(ranked)[-1] if ranked else None

    def put(self, content: Content, slot: int, turn: int = 0) -> None:
        """Put a content into an empty slot, with a turn of so much."""
        assert self._slots[slot].content is None, f"slot {slot} is not empty"
        assert content not in self._slot_of, f"{content} has slot {self._slot_of[content]}"
        self._slots[slot].content, self._slots[slot].turn = content, turn
        self._slot_of[content] = slot
        self.touch(slot)

    def remove(self, content: Content) -> None:
        """Empty the slot of a content. If it has users, it is not used again before they have left."""
        self._slots[self._slot_of.pop(content)].content = None

    def touch(self, slot: int) -> None:
        """Make a slot the most recently used one."""
        self._slots[slot].used_at = self._tick()

    def spend(self, slot: int, amount: int) -> None:
        """Count an amount against the turn of a slot's content."""
        self._slots[slot].turn -= amount

    def has_turn(self, slot: int) -> bool:
        """Return whether anything is left of the turn of a slot's content."""
        return self._slots[slot].turn > 0

    def has_users(self, slot: int) -> bool:
        return self._slots[slot].users > 0

    def pin(self, slot: int) -> None:
        """Add a user to a slot."""
        if not self._slots[slot].users:
            self._slots[slot].users_since = self._tick()
        self._slots[slot].users += 1

    def unpin(self, slot: int) -> None:
        """Remove a user from a slot."""
        self._slots[slot].users -= 1

    def unpin_all(self) -> None:
        for slot in self._slots:
            slot.users = 0

    def may_pin(self, slot: int | None) -> bool:
        """Return whether a content in this slot, or in none yet, may get a new user.

        When as many slots have users as may have some, the one that has had them for longest gets no new
        ones until the next round: a content that waits can follow when they have left.
        """
        if slot is not None and slot not in self._shared:
            return True
        if slot in self._closed:
            return False
        used = {number for number in self._shared if self._slots[number].users}
        if slot in used or len(used) < self._most_used:
            return True
        if used - self._closed:
            self._closed.add(min(used - self._closed, key=lambda number: self._slots[number].users_since))
        return False

    def new_round(self) -> None:
        """Let all slots get new users again."""
        self._closed.clear()

    def _tick(self) -> int:
        self._time += 1
        return self._time
