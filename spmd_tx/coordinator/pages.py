"""The pages of one data shard's key-value cache: which are free, and how many hold each. Pure.

Workers run commands in the order in which they are sent, so a page may be given away as soon as the last
command that reads it for its old holder has been sent.
"""

from collections.abc import Iterable

TRASH_PAGE = 0  # takes what nobody reads: padding and dead rows


class PagePool:
    """Pages 1 to ``pages`` - 1, counted by reference."""

    def __init__(self, pages: int) -> None:
        self._free = list(range(pages - 1, TRASH_PAGE, -1))  # the lowest number is taken first
        self._holders: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Pages with one holder each; the caller has seen that so many are free."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        self._holders.update((page, 1) for page in pages)
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """Add a holder to each page."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take a holder from each page; pages without a holder are free."""
        for page in pages:
            if self._holders[page] == 1:
                del self._holders[page]
                self._free.append(page)
            else:
                self._holders[page] -= 1

    def held_once(self, pages: Iterable[int]) -> int:
        """How many of these pages their only holder could set free."""
        return sum(self._holders[page] == 1 for page in pages)


def pages_for(tokens: int, page_size: int) -> int:
    """How many pages so many tokens fill, the last one perhaps in part."""
    return -(-tokens // page_size)
