"""Which pages of a data shard hold the keys and values of which beginnings of texts. Pure.

A full page is known by its scope (the weights, and who may know of it), its tokens and all tokens before
them. Nothing is ever wrong in here: weights that are replaced have another scope, and a page that gets
other contents is forgotten.
"""

from collections.abc import Sequence
from hashlib import blake2b
from itertools import takewhile

import numpy as np

from spmd_tx.coordinator.pages import PagePool

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
