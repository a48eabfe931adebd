"""Ends the pages of listings by their bytes, since an entry may be a thousand times as large as another."""

import msgspec


class PageRoom:
    """Counts what is left of a page's bytes. The first entry always fits, so that pages lead on."""

    def __init__(self, most_bytes: int) -> None:
        self._left = most_bytes
        self._is_empty = True

    def takes(self, entry: object) -> bool:
        """Return whether the page has room for one more entry, and count it if so."""
        return self.takes_bytes(len(msgspec.json.encode(entry)))

    def takes_bytes(self, size: int) -> bool:
        """Count an entry of so many bytes, as ``takes`` does."""
        if size > self._left and not self._is_empty:
            self._left = 0  # what comes behind would be out of order
            return False
        self._left -= size
        self._is_empty = False
        return True
