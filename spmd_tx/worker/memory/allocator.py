"""Tunes the C library's use of free memory, which steps reuse and compilation leaves behind."""

import ctypes
import sys
from collections.abc import Callable
from functools import cache

# mallopt's options (man mallopt); malloc.h has the numbers.
TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8
MOST_KEPT = 1 << 30  # free bytes kept at the heap's end


def keep_free_memory() -> None:
    """Let this process reuse the memory of one step for the next, instead of fresh pages every time.

    On a CPU, XLA takes a step's memory from malloc, which would map large blocks anew, with a page fault per
    4 KiB. Call it before threads start. Does nothing where the C library is not glibc.
    """
    set_option = _of_glibc("mallopt")
    if set_option is not None:
        set_option(ARENA_MAX, 1)
        set_option(MMAP_MAX, 0)
        set_option(TRIM_THRESHOLD, MOST_KEPT)


def free_memory() -> None:
    """Return free memory to the system. Does nothing where the C library is not glibc."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


@cache
def _of_glibc(name: str) -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return getattr(library, name, None) if hasattr(library, "gnu_get_libc_version") else None
