"""Tells the coordinator, from a thread of its own, that this process is alive and what it is doing."""

import threading
from types import TracebackType

from spmd_tx.protocol import BEAT_SECONDS, Beat
from spmd_tx.worker.inbox import Inbox


class Heartbeat:
    """Beats while it is entered; a step that runs or is compiled does not stop it."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        with self._inbox.aside() as report:
            while True:
                report(Beat, sequence=self._inbox.executing)
                if self._end.wait(BEAT_SECONDS):
                    return
