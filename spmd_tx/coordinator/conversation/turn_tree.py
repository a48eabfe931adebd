"""A tree of sampled turns, in which a conversation finds the turn that it goes on from. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from spmd_tx.coordinator.conversation.messages import Message
from spmd_tx.coordinator.conversation.turns import MessageKey, SampledTurn, message_keys


class BranchCause(StrEnum):
    """Says why a turn stands where it does in its tree."""

    FIRST = "first"  # of its tree
    CONTINUES = "continues"  # the newest turn of its path
    RETRY = "retry"  # the same prompt again
    EDITED = "edited"  # a message differs from the one that was there
    TOOLS_CHANGED = "tools_changed"  # or variables of the template
    REWRITTEN = "rewritten"  # the template writes what was there before in another way
    STOP_DIFFERS = "stop_differs"  # the template ends the turn before with another token than was sampled
    STOPPED = "stopped"  # a stop string has cut off what the client has seen of the turn before
    NEW = "new"  # another conversation


@dataclass(frozen=True)
class Branch:
    """Says why a turn does not go on from the newest one; ``message`` is the first that differs."""

    cause: BranchCause
    message: int | None = None


@dataclass(frozen=True)
class PlaceInTree:
    """Says where a conversation stands in a tree."""

    parent: SampledTurn | None  # which it goes on from; None: from none
    known: int  # messages up to the parent's, which it includes
    messages: tuple[Message, ...]  # with sampled turns as they were sampled
    keys: tuple[MessageKey, ...]
    branch: Branch

    @property
    def new_keys(self) -> tuple[bytes, ...]:
        """The keys of the messages behind the parent."""
        return tuple(key.digest for key in self.keys if self.parent is None or key.place >= self.known)

    def detached(self, cause: BranchCause) -> PlaceInTree:
        """Return the place of the same conversation as a new root."""
        return replace(self, parent=None, known=0, branch=Branch(cause))


class TurnTree:
    """Holds turns, and finds them by what conversations say."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.size = 0  # bytes, about
        self.turns: dict[str, SampledTurn] = {}  # by id, in the order of sampling
        self._by_key: dict[bytes, list[SampledTurn]] = {}
        self._by_carrier: dict[str, SampledTurn] = {}  # ids that clients send back
        self._seen: set[bytes] = set()  # keys of all messages
        self._parents: set[str] = set()  # ids of turns that others go on from

    def add(self, turn: SampledTurn) -> None:
        """Add a turn. Adding it again changes nothing."""
        if turn.id in self.turns:
            return
        self.turns[turn.id] = turn
        self.size += turn.size
        self._by_key.setdefault(turn.key, []).append(turn)
        self._seen.update(turn.keys)
        if turn.parent is not None:
            self._parents.add(turn.parent.id)
        for carrier in carriers(turn):
            self._by_carrier[carrier] = turn

    def place(self, messages: Sequence[Message], settings: bytes) -> PlaceInTree:
        """Find the deepest turn that a conversation goes on from."""
        keys = message_keys(messages)
        for at in reversed(range(len(keys))):
            if keys[at].is_assistant and keys[at].digest in self._by_key:
                found = self._choose(self._by_key[keys[at].digest], messages, keys[: at + 1])
                if found is None:
                    continue
                if found.settings != settings:
                    return self._root(messages, keys, Branch(BranchCause.TOOLS_CHANGED))
                if not found.is_continuable:
                    return self._root(messages, keys, Branch(BranchCause.STOPPED))
                known = keys[at].place + 1
                stored = _stored(messages, keys[: at + 1], found)
                return PlaceInTree(found, known, stored, tuple(keys), self._branch(keys, at, found))
        return self._root(messages, keys, self._branch(keys, -1, None))

    def _root(self, messages: Sequence[Message], keys: list[MessageKey], branch: Branch) -> PlaceInTree:
        return PlaceInTree(None, 0, tuple(messages), tuple(keys), branch)

    def _choose(
        self, candidates: Sequence[SampledTurn], messages: Sequence[Message], keys: Sequence[MessageKey]
    ) -> SampledTurn | None:
        """Return the turn that the messages mean: no id speaks against it, and most speak for it."""
        best, most = None, -1
        for turn in candidates:
            agreeing = self._agreement(turn, messages, keys)
            if agreeing is not None and agreeing >= most:
                best, most = turn, agreeing
        return best

    def _agreement(
        self, turn: SampledTurn, messages: Sequence[Message], keys: Sequence[MessageKey]
    ) -> int | None:
        """Count what the client has sent back of the turns of a path; None if something differs."""
        by_key = {key.digest: key.place for key in keys}
        count = 0
        for at in turn.path():
            if at.key not in by_key:
                return None
            sent = messages[by_key[at.key]]
            named = [self._by_carrier[each] for each in _sent_carriers(sent) if each in self._by_carrier]
            if any(other is not at for other in named):
                return None
            if sent.reasoning and sent.reasoning.strip() != at.message.reasoning.strip():
                return None
            count += bool(named) + bool(sent.reasoning)
        return count

    def _branch(self, keys: Sequence[MessageKey], at: int, parent: SampledTurn | None) -> Branch:
        if not self.turns:
            return Branch(BranchCause.FIRST)
        last = max((place for place, key in enumerate(keys) if key.digest in self._seen), default=-1)
        if last < 0:
            return Branch(BranchCause.NEW)
        if last == len(keys) - 1 and last > at:
            return Branch(BranchCause.RETRY)
        if parent is not None and last == at and parent.id not in self._parents:
            return Branch(BranchCause.CONTINUES)
        return Branch(BranchCause.EDITED, keys[min(last + 1, len(keys) - 1)].place)


def carriers(turn: SampledTurn) -> list[str]:
    """Return the ids by which clients name a turn when they send it back."""
    return [turn.id, *_sent_carriers(turn.message)]


def _sent_carriers(message: Message) -> list[str]:
    ids = [call.id for call in message.calls if call.id is not None]
    return ids if message.turn_id is None else [message.turn_id, *ids]


def _stored(
    messages: Sequence[Message], keys: Sequence[MessageKey], turn: SampledTurn
) -> tuple[Message, ...]:
    """Put the messages of a path in the places of those that a client has sent."""
    stored, places = list(messages), {key.digest: key.place for key in keys}
    for at in turn.path():
        sent = stored[places[at.key]]
        # Results name their calls by the ids that the client has sent.
        calls = tuple(
            replace(call, id=named.id) for call, named in zip(at.message.calls, sent.calls, strict=True)
        )
        stored[places[at.key]] = replace(at.message, calls=calls)
    return tuple(stored)
