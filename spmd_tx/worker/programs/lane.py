"""A thread that compiles one thing after the other."""

import os
import sys
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

STACK_BYTES = 64 << 20  # XLA recurses deeply, and the stacks of threads are small by default
STOP_SECONDS = 5.0  # for a program that is being compiled when the worker has to end

Work = Callable[[], None]


class Lane:
    """Does its work in the order of its arrival, in a thread that starts with the first."""

    def __init__(
        self,
        name: str,
        niceness: Callable[[], int],
        on_idle: Callable[[], None] = lambda: None,
        idle_seconds: float | None = None,
    ) -> None:
        """``niceness`` is asked for when the thread starts.

        ``on_idle`` is called in the thread when there was no work for ``idle_seconds``; None: never.
        """
        self._niceness = niceness
        self._on_idle, self._idle_seconds = on_idle, idle_seconds
        self._waiting: SimpleQueue[Work | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._has_begun = False

    def put(self, work: Work) -> None:
        self._waiting.put(work)
        if not self._has_begun:
            self._has_begun = True
            usual = threading.stack_size(STACK_BYTES)
            self._thread.start()
            threading.stack_size(usual)

    def stop(self) -> bool:
        """Start nothing more; return whether nothing is being compiled."""
        self._waiting.put(None)
        if self._has_begun:
            self._thread.join(STOP_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        niceness = self._niceness()
        if sys.platform == "linux" and niceness:
            thread = threading.get_native_id()
            least = os.getpriority(os.PRIO_PROCESS, thread)  # of the process: only root may go below it
            os.setpriority(os.PRIO_PROCESS, thread, max(niceness, least))
        while (work := self._next()) is not None:
            work()

    def _next(self) -> Work | None:
        try:
            return self._waiting.get(timeout=self._idle_seconds)
        except Empty:
            self._on_idle()
            return self._waiting.get()
