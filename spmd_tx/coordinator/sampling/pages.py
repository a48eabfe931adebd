"""The pages of one data shard's key-value cache: which are free, and how many hold each. Pure.

Workers run commands in the order in which they are sent, so a page may be given away as soon as the last
command that reads it for its old holder has been sent. What a page holds may be worth remembering: then it
stays as it is when its last holder lets go, until the page is wanted for something else.
"""

from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import takewhile

import numpy as np

DIGEST_BYTES = 16


class BlockKeys:
    """The keys of a growing text's full pages; each depends on all tokens up to its end."""

    def __init__(self, scope: str, page_size: int) -> None:
        self.scope = scope
        self._page_size = page_size
        self._keys: list[bytes] = []

    def first(self, count: int, tokens: Sequence[int]) -> list[bytes]:
        """Those of the first pages. Tokens that were there before are still the same."""
        while len(self._keys) < count:
            start = len(self._keys) * self._page_size
            block = np.asarray(tokens[start : start + self._page_size], "<i4")
            assert len(block) == self._page_size, f"page {len(self._keys)} is not full"
            before = self._keys[-1] if self._keys else self.scope.encode()
            digest = blake2b(block.tobytes(), key=blake2b(before).digest(), digest_size=DIGEST_BYTES)
            self._keys.append(digest.digest())
        return self._keys[:count]


class PrefixCache:
    """Pages of one data shard by the keys of what they hold."""

    def __init__(self, pages: int) -> None:
        self.pool = PagePool(pages, self._forget)
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest beginning that is there. They stay only if they are held at once."""
        return [self._pages[key] for key in takewhile(self._pages.__contains__, keys)]

    def remember(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """These pages hold, or will before any later command reads them, what the keys stand for."""
        for key, page in zip(keys, pages, strict=True):
            if key not in self._pages and page not in self._keys:
                self._pages[key], self._keys[page] = page, key
                self.pool.remember(page)

    def recall(self, keys: Sequence[bytes], pages: Sequence[tuple[int, int]]) -> None:
        """The same of pages, each with its number of takes, that are free already, as far as they still are.

        The last ones are to be reused first.
        """
        for key, (page, takes) in reversed(list(zip(keys, pages, strict=True))):
            if key not in self._pages and page not in self._keys and self.pool.recall(page, takes):
                self._pages[key], self._keys[page] = page, key

    def _forget(self, page: int) -> None:
        del self._pages[self._keys.pop(page)]


TRASH_PAGE = 0  # takes what nobody reads: padding and dead rows


class PagePool:
    """Pages 1 to ``pages`` - 1, counted by reference."""

    def __init__(self, pages: int, on_reuse: Callable[[int], None] = lambda page: None) -> None:
        """``on_reuse`` hears of a remembered page that gets other contents."""
        self._free = list(range(pages - 1, TRASH_PAGE, -1))  # the lowest number is taken first
        self._holders: dict[int, int] = {}
        self._remembered: set[int] = set()
        self._idle: dict[int, None] = {}  # remembered pages without a holder, the first to be reused first
        self._on_reuse = on_reuse
        self._takes = [0] * pages  # how often each page was taken

    @property
    def free(self) -> int:
        """How many may be taken."""
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int]:
        """Pages with one holder each; the caller has seen that so many are free."""
        assert count <= self.free, f"{count} pages wanted, {self.free} free"
        pages = [self._free.pop() if self._free else self._reuse() for _ in range(count)]
        self._holders.update((page, 1) for page in pages)
        for page in pages:
            self._takes[page] += 1
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Add a holder to each page; a remembered one may be without any."""
        for page in pages:
            if page in self._idle:
                del self._idle[page]
                self._holders[page] = 1
            else:
                self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Take a holder from each page; pages without a holder are free.

        They come in the order of positions. The last ones are reused first, as nobody can use what is
        behind a page that is gone.
        """
        for page in reversed(pages):
            if self._holders[page] > 1:
                self._holders[page] -= 1
                continue
            del self._holders[page]
            if page in self._remembered:
                self._idle[page] = None
            else:
                self._free.append(page)

    def remember(self, page: int) -> None:
        """What this page holds, now that somebody holds it, is worth keeping for a while."""
        assert page in self._holders, f"page {page} has no holder"
        self._remembered.add(page)

    def takes(self, page: int) -> int:
        """How often it was taken; as long as this does not change, it holds what was written last."""
        return self._takes[page]

    def recall(self, page: int, takes: int) -> bool:
        """Remember a page that is free, unless it was taken since ``takes`` was its number."""
        if page in self._holders or page in self._remembered or self._takes[page] != takes:
            return False
        self._free.remove(page)
        self._remembered.add(page)
        self._idle[page] = None
        return True

    def is_held(self, page: int) -> bool:
        return page in self._holders

    def held_once(self, pages: Sequence[int]) -> int:
        """How many of these pages their only holder could set free."""
        return sum(self._holders[page] == 1 for page in pages)

    def _reuse(self) -> int:
        page = next(iter(self._idle))
        del self._idle[page]
        self._remembered.discard(page)
        self._on_reuse(page)
        return page


def pages_for(tokens: int, page_size: int) -> int:
    """How many pages so many tokens fill, the last one perhaps in part."""
    return -(-tokens // page_size)
