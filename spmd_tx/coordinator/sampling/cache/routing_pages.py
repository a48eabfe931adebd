"""The experts of tokens in the prefix cache, page by page. Pure.

Workers report a token's experts once, when they read or draw it. A sample that finds its pages takes them
from here: routing replay needs those of every token.
Dimension key as in routing_notes.py.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile

import numpy as np

MOST_BYTES = 256 << 20  # of one data shard


class RoutingPages:
    """Keeps the experts of pages by the pages' keys; the least recently used ones go first."""

    def __init__(self, page_size: int, most_bytes: int = MOST_BYTES) -> None:
        self._page_size = page_size
        self._most_bytes = most_bytes
        self._bytes = 0
        self._pages = OrderedDict[bytes, np.ndarray]()  # [page size, L, C]; least recently used first

    def knows(self, key: bytes) -> bool:
        return key in self._pages

    def known(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys up to the first page whose experts are not known."""
        return list(takewhile(self._pages.__contains__, keys))

    def of(self, keys: Sequence[bytes]) -> np.ndarray:
        """Return the experts [N, L, C] of a text's first pages, at least one, all of which are known.

        The last one may be partly filled.
        """
        self._use((key, self._pages[key]) for key in keys)
        return np.concatenate([self._pages[key] for key in keys])

    def remember(self, keys: Sequence[bytes], experts_NLC: np.ndarray) -> None:
        """Keep the experts of a text's first pages, of all their tokens. The last may be partly filled."""
        size = self._page_size
        self._use((key, experts_NLC[size * page : size * (page + 1)]) for page, key in enumerate(keys))

    def forget(self, key: bytes) -> None:
        """Forget a page, if it is known."""
        page = self._pages.pop(key, None)
        self._bytes -= 0 if page is None else page.nbytes

    def _use(self, pages: Iterable[tuple[bytes, np.ndarray]]) -> None:
        """Make pages the most recently used, the first one most of all: others are of no use without it."""
        for key, page in reversed(list(pages)):
            kept = self._pages.pop(key, None)
            self._bytes += page.nbytes if kept is None else 0
            self._pages[key] = page.copy() if kept is None else kept
        while self._bytes > self._most_bytes:
            self.forget(next(iter(self._pages)))
