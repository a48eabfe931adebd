"""The schedulers of the groups of one base model, which know together when a session is over.

One that has no samples left may take some that wait for another one.
"""

from collections.abc import Callable

from spmd_tx.coordinator.scheduler.request_table import RequestTable


class Siblings:
    """Holds the requests of each, and what gives back there what a session holds."""

    def __init__(self, ran_dry: Callable[[], None] = lambda: None) -> None:
        """``ran_dry`` is called when one has answered its last sample."""
        self._all: list[tuple[RequestTable, Callable[[str], None]]] = []
        self.ran_dry = ran_dry

    def join(self, table: RequestTable, free: Callable[[str], None]) -> None:
        self._all.append((table, free))

    @property
    def sessions_at_work(self) -> set[str]:
        return set[str]().union(*(table.sessions_at_work for table, _ in self._all))

    def free(self, session_id: str) -> None:
        """Give back everywhere what a session holds, if it has ended and has no work left anywhere."""
        tables = [table for table, _ in self._all]
        has_ended = any(table.has_ended(session_id) for table in tables)
        if has_ended and not any(table.works_for(session_id) for table in tables):
            for _, free in self._all:
                free(session_id)
