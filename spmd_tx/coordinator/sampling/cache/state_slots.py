"""The state slots of sequences on one data shard: those of rows, and snapshots for prefixes. Pure.

A state of a fixed size cannot be cut back to an earlier token, as pages can. So a prefix that is found in the
cache is only of use up to a snapshot: a slot that holds the state after exactly its tokens. A snapshot hangs
on its last page, which holds the last of its tokens and may be partly filled. It goes when that page gets new
contents, or, if slots run out, when it is the least recently used.

Workers run commands in order. A slot may be written as soon as the last command that reads it has been sent.
A command first copies the snapshots from which rows start into the rows' own slots, one after another, then
reads the rows, then makes its other copies; so what it copies can be found only by later commands.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from spmd_tx.coordinator.sampling.cache.pages import DIGEST_BYTES, PrefixCache
from spmd_tx.protocol.commands import PREFILL_TOKENS

NOTHING = 0  # the slot of zeros, from which a row that has read nothing starts
INTERVAL = PREFILL_TOKENS  # tokens of a long prompt between snapshots: the parts in which it is read


@dataclass(frozen=True)
class Prefix:
    """Says after which content a snapshot is: full pages, and the tokens behind them."""

    before: bytes  # key of the last full page, or of the scope if there is none
    tail: tuple[int, ...] = ()  # tokens on the partly filled page

    @property
    def key(self) -> bytes:
        """The key of the last page."""
        if not self.tail:
            return self.before
        tokens = np.asarray(self.tail, "<i4").tobytes()
        return blake2b(b"tail" + self.before + tokens, digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True)
class Hit:
    """Says from what a row may start instead of reading its first tokens."""

    slot: int
    length: int  # tokens
    pages: list[int]  # the pages that hold them; a partly filled last one must be copied before it is written


NO_HIT = Hit(NOTHING, 0, [])


def prefix_of(scope: str, keys: Sequence[bytes], content: Sequence[int], page_size: int) -> Prefix:
    """Return the place after the whole of ``content``, of whose full pages these are the keys."""
    full = len(content) // page_size
    before = keys[full - 1] if full else scope.encode()
    return Prefix(before, tuple(content[full * page_size :]))


def ends_on_device(stop_reason: str | None, last_token: int, device_tokens: Sequence[int]) -> bool:
    """Say whether the device itself ended a sample, so that its row's state is that before the last token.

    A stop string, or a stop token that the device does not check, ends a sample after the fact: the row may
    have read tokens that are not part of the text.
    """
    return stop_reason == "length" or (stop_reason == "stop" and last_token in device_tokens)


def is_due(position: int, end: int) -> bool:
    """Say whether a snapshot is wanted after the first ``position`` tokens of a prompt read up to ``end``."""
    return position > 0 and (position == end or position % INTERVAL == 0)


class StateCache:
    """Lends slots 1 to ``slots`` - 1 to rows, and keeps snapshots in those that no row needs."""

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots - 1, NOTHING, -1))  # the lowest number is taken first
        self._snapshots: dict[bytes, int] = {}  # by the key of the last page, least recently used first
        self._planned: dict[bytes, int] = {}  # those that the command being planned will write
        self._doomed: list[int] = []  # slots that it will write although nobody needs them any more
        self._tails: dict[bytes, Counter[int]] = {}  # snapshots by length of tail, by the key before it
        self._prefixes: dict[bytes, Prefix] = {}

    @property
    def free(self) -> int:
        """How many slots may be taken."""
        return len(self._free) + len(self._snapshots)

    def take(self, count: int) -> list[int]:
        """Return slots for rows; at least ``count`` must be free."""
        assert count <= self.free, f"{count} slots wanted, {self.free} free"
        while len(self._free) < count:
            self._drop(next(iter(self._snapshots)))
        return [self._free.pop() for _ in range(count)]

    def release(self, slots: Sequence[int]) -> None:
        """Take back slots whose states nobody needs."""
        self._free += reversed(slots)

    def keep(self, slot: int, prefix: Prefix) -> None:
        """Take back a row's slot whose state, once all sent commands have run, is that after ``prefix``.

        It is a snapshot from now on. Its last page must be in the prefix cache.
        """
        if prefix.key in self._prefixes:
            self.release([slot])
        else:
            self._add(prefix)
            self._snapshots[prefix.key] = slot

    def plan_copy(self, prefix: Prefix) -> int | None:
        """Return a slot for a snapshot which the command being planned copies there.

        None if there is one after ``prefix`` already, or all slots are needed. The last page must be in the
        prefix cache.
        """
        if prefix.key in self._prefixes or not self.free:
            return None
        (slot,) = self.take(1)
        self._add(prefix)
        self._planned[prefix.key] = slot
        return slot

    def sent(self) -> None:
        """Let the snapshots of the planned command be found: it has been sent."""
        self._snapshots |= self._planned
        self._planned = {}
        self.release(self._doomed)
        self._doomed = []

    def find(
        self,
        cache: PrefixCache,
        scope: str,
        keys: Sequence[bytes],
        content: Sequence[int],
        page_size: int,
        is_usable: Callable[[bytes], bool] = lambda key: True,
    ) -> Hit | None:
        """Return the longest beginning of ``content`` that has a snapshot and whose pages are cached.

        ``keys`` are those of its full pages; a partly filled page must be ``is_usable``. The pages stay only
        if they are held at once.
        """
        pages = cache.find(keys)
        for full in range(len(pages), -1, -1):
            before = keys[full - 1] if full else scope.encode()
            for length in sorted(self._tails.get(before, ()), reverse=True):
                tail = tuple(content[full * page_size : full * page_size + length])
                prefix = Prefix(before, tail)
                last = cache.find([prefix.key]) if tail and is_usable(prefix.key) else []
                if prefix.key not in self._snapshots or len(tail) < length or len(last) < bool(tail):
                    continue
                slot = self._snapshots.pop(prefix.key)
                self._snapshots[prefix.key] = slot  # now the last one to be dropped
                return Hit(slot, full * page_size + length, pages[:full] + last)
        return None

    def forget(self, key: bytes) -> None:
        """Drop the snapshot that hangs on a page, if there is one: the page gets new contents.

        A planned one goes, too, but its slot is lent again only after the command that writes it.
        """
        if key in self._snapshots:
            self._drop(key)
        elif key in self._planned:
            self._remove(key)
            self._doomed.append(self._planned.pop(key))

    def _drop(self, key: bytes) -> None:
        self._remove(key)
        self.release([self._snapshots.pop(key)])

    def _add(self, prefix: Prefix) -> None:
        self._prefixes[prefix.key] = prefix
        self._tails.setdefault(prefix.before, Counter())[len(prefix.tail)] += 1

    def _remove(self, key: bytes) -> None:
        prefix = self._prefixes.pop(key)
        if tails := self._tails.pop(prefix.before) - Counter([len(prefix.tail)]):
            self._tails[prefix.before] = tails
