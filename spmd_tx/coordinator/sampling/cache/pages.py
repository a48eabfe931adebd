"""The paged key-value cache of one data shard: a reference-counted page pool and a prefix cache. Pure.

Workers run commands in the order in which they are sent, so a page may be reused as soon as the last command
that reads it for its old holder has been sent. The prefix cache finds full pages by a hash of all tokens up
to their end; a page that it remembers keeps its contents after its last holder left, until it is reused.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import takewhile

import numpy as np

DIGEST_BYTES = 16
TRASH_PAGE = 0  # written by padding and dead rows, read by nobody


class PagePool:
    """Counts the holders of pages 1 to ``pages`` - 1."""

    def __init__(self, pages: int, on_reuse: Callable[[int], None] = lambda page: None) -> None:
        """``on_reuse`` is called with a remembered page that gets new contents."""
        # In the order of release; the last one is taken first. A dict, as any page may be recalled.
        self._free = dict.fromkeys(range(pages - 1, TRASH_PAGE, -1))
        self._holders: dict[int, int] = {}
        self._remembered: set[int] = set()
        # Remembered pages without a holder, in the order of reuse. A dict would look for its first key.
        self._idle = OrderedDict[int, None]()
        self._on_reuse = on_reuse
        self._takes = [0] * pages  # how often each page was taken

    @property
    def free(self) -> int:
        """How many pages may be taken."""
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int]:
        """Return pages with one holder each; at least ``count`` must be free."""
        assert count <= self.free, f"{count} pages wanted, {self.free} free"
        pages = [self._free.popitem()[0] if self._free else self._reuse() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
            self._takes[page] += 1
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Add a holder to each page, which has one already or is remembered."""
        for page in pages:
            if page in self._idle:
                del self._idle[page]
                self._holders[page] = 1
            else:
                self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove a holder from each page; pages without a holder are free.

        ``pages`` are in the order of positions. The last ones are reused first: a prefix is of no use beyond
        a page that is gone.
        """
        for page in reversed(pages):
            if self._holders[page] > 1:
                self._holders[page] -= 1
                continue
            del self._holders[page]
            if page in self._remembered:
                self._idle[page] = None
            else:
                self._free[page] = None

    def remember(self, page: int) -> None:
        """Keep the contents of a page, which must have a holder, until it is reused."""
        assert page in self._holders, f"page {page} has no holder"
        self._remembered.add(page)

    def takes(self, page: int) -> int:
        """Return how often a page was taken. Its contents last as long as this does not change."""
        return self._takes[page]

    def recall(self, page: int, takes: int) -> bool:
        """Remember a free page, unless it was taken since ``takes`` was its number; return whether it was."""
        if page in self._holders or page in self._remembered or self._takes[page] != takes:
            return False
        del self._free[page]
        self._remembered.add(page)
        self._idle[page] = None
        return True

    def is_held(self, page: int) -> bool:
        return page in self._holders

    def holders(self, page: int) -> int:
        return self._holders.get(page, 0)

    def _reuse(self) -> int:
        page, _ = self._idle.popitem(last=False)
        self._remembered.discard(page)
        self._on_reuse(page)
        return page


class BlockKeys:
    """Computes the keys of a growing content's full pages. Each depends on all tokens up to its end."""

    def __init__(self, scope: str, page_size: int) -> None:
        self.scope = scope
        self._page_size = page_size
        self._keys: list[bytes] = []

    def first(self, count: int, tokens: Sequence[int]) -> list[bytes]:
        """Return the keys of the first ``count`` pages. Earlier calls had the same tokens at the start."""
        size, first = self._page_size, len(self._keys)
        if count <= first:
            return self._keys[:count]
        blocks = np.asarray(tokens[first * size : count * size], "<i4")
        assert len(blocks) == (count - first) * size, f"page {count - 1} is not full"
        before = self._keys[-1] if self._keys else blake2b(self.scope.encode()).digest()
        for block in blocks.reshape(-1, size):
            before = blake2b(before + block.tobytes(), digest_size=DIGEST_BYTES).digest()
            self._keys.append(before)
        return self._keys[:count]


class PrefixCache:
    """Finds pages of one data shard by the keys of their contents."""

    def __init__(self, pages: int, on_forget: Callable[[bytes], None] = lambda key: None) -> None:
        """``on_forget`` is called with the key of a cached page that gets new contents."""
        self.pool = PagePool(pages, self._forget)
        self._on_forget = on_forget
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._parts: dict[int, list[bytes]] = {}  # keys of the first tokens on a page

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """Return the pages of the longest cached beginning. They stay only if they are held at once."""
        return [self._pages[key] for key in takewhile(self._pages.__contains__, keys)]

    def remember(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Cache pages that hold the contents of these keys, or will before any later command reads them."""
        for key, page in zip(keys, pages, strict=True):
            if key not in self._pages and page not in self._keys:
                self._pages[key], self._keys[page] = page, key
                self.pool.remember(page)

    def remember_part(self, key: bytes, page: int) -> None:
        """Cache a page whose first tokens are the contents of this key; others may follow them."""
        if key not in self._pages:
            self._pages[key] = page
            self._parts.setdefault(page, []).append(key)
            self.pool.remember(page)

    def recall(self, keys: Sequence[bytes], pages: Sequence[tuple[int, int]]) -> None:
        """Cache free pages, the last to be reused first, unless taken since each had so many takes."""
        for key, (page, takes) in reversed(list(zip(keys, pages, strict=True))):
            if key not in self._pages and page not in self._keys and self._recall(page, takes):
                self._pages[key], self._keys[page] = page, key

    def recall_part(self, key: bytes, page: int, takes: int) -> None:
        """Do what ``recall`` does for a page as in ``remember_part``."""
        if key not in self._pages and self._recall(page, takes):
            self._pages[key] = page
            self._parts.setdefault(page, []).append(key)

    def _recall(self, page: int, takes: int) -> bool:
        if page in self._parts:  # remembered already
            return self.pool.takes(page) == takes
        return self.pool.recall(page, takes)

    def _forget(self, page: int) -> None:
        full = [self._keys.pop(page)] if page in self._keys else []
        for key in [*full, *self._parts.pop(page, [])]:
            del self._pages[key]
            self._on_forget(key)


def pages_for(tokens: int, page_size: int) -> int:
    """Return how many pages ``tokens`` tokens need."""
    return -(-tokens // page_size)
