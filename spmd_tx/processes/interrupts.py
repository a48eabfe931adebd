"""Lets Ctrl-C end this process at once and without a traceback, where nothing has to be cleaned up."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_by_interrupts() -> Iterator[None]:
    """Leave Ctrl-C to the kernel: a KeyboardInterrupt within an import may come up in any callback."""
    before = signal.getsignal(signal.SIGINT)
    leave_to_kernel()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def leave_to_kernel() -> None:
    """Let Ctrl-C end this process from now on, unless it was started to ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
