"""Says for which group of workers code runs, so that the log can name it where a server has several."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_current: ContextVar[str | None] = ContextVar("group", default=None)


def current() -> str | None:
    """Return the name of the group; None: what runs is for all, or for the only one."""
    return _current.get()


@contextmanager
def entered(name: str | None) -> Iterator[None]:
    """Name a group in this block, and in the tasks that begin there."""
    token = _current.set(name)
    try:
        yield
    finally:
        _current.reset(token)
