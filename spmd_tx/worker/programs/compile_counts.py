"""Counts the programs that this process compiles, or loads instead, by name and source."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from jax import monitoring

from spmd_tx.protocol.programs import CompileCount, Source

# JAX's events about a compilation, in the thread that waits for it.
CACHE_HIT = "/jax/compilation_cache/cache_hits"
COMPILED = "/jax/core/compile/backend_compile_duration"  # also after a cache hit

OTHER = "other"  # outside the engine's steps, such as slices of arrays that are saved


class CompileCounts:
    """Counts compilations since the process started. Any thread may read them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._here = threading.local()
        self._counts: dict[tuple[str, Source], tuple[int, float]] = {}

    @contextmanager
    def of(self, program: str) -> Iterator[list[Source]]:
        """Attribute to the program what this thread compiles inside; the list gets its sources."""
        self._here.program, self._here.sources = program, []
        try:
            yield self._here.sources
        finally:
            self._here.program, self._here.sources = OTHER, []

    def add(self, program: str, source: Source, seconds: float) -> None:
        """Count a program. JAX's events count those that it compiles in this process."""
        with self._lock:
            count, total = self._counts.get((program, source), (0, 0.0))
            self._counts[program, source] = count + 1, total + seconds

    def all(self) -> list[CompileCount]:
        with self._lock:
            return [
                CompileCount(program=program, source=source, count=count, seconds=seconds)
                for (program, source), (count, seconds) in self._counts.items()
            ]

    def hear(self, event: str, **_: object) -> None:
        if event == CACHE_HIT:
            self._here.is_cached = True

    def hear_duration(self, event: str, duration_secs: float, **_: object) -> None:
        if event != COMPILED:
            return
        source: Source = "cache" if getattr(self._here, "is_cached", False) else "compiler"
        self._here.is_cached = False
        if hasattr(self._here, "sources"):
            self._here.sources.append(source)
        self.add(getattr(self._here, "program", OTHER), source, duration_secs)


@cache
def compile_counts() -> CompileCounts:
    """Return the counts of this process, which begin with the first call."""
    counts = CompileCounts()
    monitoring.register_event_listener(counts.hear)
    monitoring.register_event_duration_secs_listener(counts.hear_duration)
    return counts
