"""How the C library deals with free memory: steps ask for the same again, compiling leaves much of it."""

import ctypes
import sys
from collections.abc import Callable
from functools import cache

# mallopt's options (man mallopt); malloc.h has the numbers.
TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8
MOST_KEPT = 1 << 30  # bytes at the heap's end


def keep_free_memory() -> None:
    """Let this process use the memory of one step again for the next, instead of fresh pages every time.

    XLA takes what a step needs on a CPU from malloc, which would map large blocks anew, with a page fault for
    each 4 KiB. To be called before there are threads. Does nothing where the C library is not glibc.
    """
    set_option = _of_glibc("mallopt")
    if set_option is not None:
        set_option(ARENA_MAX, 1)
        set_option(MMAP_MAX, 0)
        set_option(TRIM_THRESHOLD, MOST_KEPT)


def free_memory() -> None:
    """Give back to the system what is free. Does nothing where the C library is not glibc."""
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


@cache
def _of_glibc(name: str) -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    return getattr(library, name, None) if hasattr(library, "gnu_get_libc_version") else None
