"""Counts what XLA compiles in this process, or loads from the persistent cache, by program."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from jax import monitoring

from spmd_tx.protocol.programs import CompileCount

# JAX's events about a compilation, in the thread that waits for it.
CACHE_HIT = "/jax/compilation_cache/cache_hits"
COMPILED = "/jax/core/compile/backend_compile_duration"  # also after a cache hit

OTHER = "other"  # outside the engine's steps, such as slices of arrays that are saved


class CompileCounts:
    """Counts compilations since the process started. Any thread may read them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._here = threading.local()
        self._counts: dict[tuple[str, bool], tuple[int, float]] = {}

    @contextmanager
    def of(self, program: str) -> Iterator[None]:
        """Attribute to the program what this thread compiles inside."""
        self._here.program = program
        try:
            yield
        finally:
            self._here.program = OTHER

    def all(self) -> list[CompileCount]:
        with self._lock:
            return [
                CompileCount(program=program, is_cached=is_cached, count=count, seconds=seconds)
                for (program, is_cached), (count, seconds) in self._counts.items()
            ]

    def hear(self, event: str, **_: object) -> None:
        if event == CACHE_HIT:
            self._here.is_cached = True

    def hear_duration(self, event: str, duration_secs: float, **_: object) -> None:
        if event != COMPILED:
            return
        key = getattr(self._here, "program", OTHER), getattr(self._here, "is_cached", False)
        self._here.is_cached = False
        with self._lock:
            count, total = self._counts.get(key, (0, 0.0))
            self._counts[key] = count + 1, total + duration_secs


@cache
def compile_counts() -> CompileCounts:
    """Return the counts of this process, which begin with the first call."""
    counts = CompileCounts()
    monitoring.register_event_listener(counts.hear)
    monitoring.register_event_duration_secs_listener(counts.hear_duration)
    return counts
