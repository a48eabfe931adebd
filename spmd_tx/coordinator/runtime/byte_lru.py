"""An LRU cache that is bounded in bytes."""

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class ByteLru(Generic[T]):
    """Keeps the most recently used values, up to a number of bytes in all."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity  # bytes
        self._size = 0
        self._values: OrderedDict[str, tuple[T, int]] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def put(self, key: str, value: T, size: int) -> None:
        if key in self._values or size > self._capacity:
            return
        self._values[key] = value, size
        self._size += size
        while self._size > self._capacity:
            _, (_, freed) = self._values.popitem(last=False)
            self._size -= freed

    def drop(self, key: str) -> None:
        """Remove a value, if it is there."""
        if key in self._values:
            self._size -= self._values.pop(key)[1]

    def get(self, key: str) -> T | None:
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]
