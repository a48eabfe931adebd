"""Tells the coordinator, from a thread of its own, that this process is alive and what it is doing."""

import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

from spmd_tx.protocol.programs import CompileReport
from spmd_tx.protocol.reports import BEAT_SECONDS, Beat, Report
from spmd_tx.worker.inbox import Inbox


class Heartbeat:
    """Sends beats while it is entered, also during steps and compilation."""

    def __init__(self, inbox: Inbox, programs: Callable[[], CompileReport] | None = None) -> None:
        self._inbox = inbox
        self._programs = programs
        self._wake = threading.Event()
        self._untold: SimpleQueue[tuple[type[Report], dict[str, Any]]] = SimpleQueue()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_ending = True
        self._wake.set()
        self._thread.join()

    def tell(self, kind: type[Report], **fields: Any) -> None:
        """Send a report, and a beat with it. Any thread may call this."""
        self._untold.put((kind, fields))
        self._wake.set()

    def _run(self) -> None:
        with self._inbox.aside() as report:
            while not self._is_ending:
                self._wake.clear()
                programs = self._programs() if self._programs else None
                report(Beat, sequence=self._inbox.executing, programs=programs)
                for kind, fields in self._news():
                    report(kind, **fields)
                self._wake.wait(BEAT_SECONDS)

    def _news(self) -> Iterator[tuple[type[Report], dict[str, Any]]]:
        try:
            while True:
                yield self._untold.get_nowait()
        except Empty:
            return
