"""Tells the coordinator that a step is being compiled, which may take a while."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class CompileLog:
    """Knows which steps have run before: jit compiles in the first call with a shape."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._seen: set[tuple[Hashable, ...]] = set()

    def first(self, *key: Hashable) -> AbstractContextManager[None]:
        """Wrap a call; the first with this key, as in ("forward", (8, 256)), is reported."""
        return nullcontext() if key in self._seen else self._compiling(key)

    @contextmanager
    def _compiling(self, key: tuple[Hashable, ...]) -> Iterator[None]:
        self._report("compiling " + " ".join(map(_text, key)))
        yield
        self._seen.add(key)
        self._report("")


def _text(part: Hashable) -> str:
    return "x".join(map(str, part)) if isinstance(part, tuple) else str(part)
