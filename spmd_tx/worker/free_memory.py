"""Gives back to the system what the C library keeps of memory that is free; compiling leaves much of it."""

import ctypes
import sys
from collections.abc import Callable
from functools import cache


def free_memory() -> None:
    """Does nothing where the C library is not glibc."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
