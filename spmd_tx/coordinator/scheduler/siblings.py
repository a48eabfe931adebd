"""The schedulers of the groups of one base model, which know together when a session is over.

One that has no samples left may take some that wait for another one.
"""

from collections.abc import Callable
from typing import Protocol


class Sibling(Protocol):
    """Carries out a part of the requests of a base model."""

    @property
    def sessions_at_work(self) -> set[str]:
        """The sessions of unfinished requests."""
        ...

    def has_ended(self, session_id: str) -> bool:
        """Whether it has heard that the session has ended."""
        ...

    def works_for(self, session_id: str) -> bool:
        """Whether a request of the session is unfinished here."""
        ...

    def free(self, session_id: str) -> None:
        """Give back what the session holds here."""
        ...


class Siblings:
    """Holds them all."""

    def __init__(self, ran_dry: Callable[[], None] = lambda: None) -> None:
        """``ran_dry`` is called when one has answered its last sample."""
        self._all: list[Sibling] = []
        self.ran_dry = ran_dry

    def join(self, sibling: Sibling) -> None:
        self._all.append(sibling)

    @property
    def sessions_at_work(self) -> set[str]:
        return set[str]().union(*(each.sessions_at_work for each in self._all))

    def is_over(self, session_id: str) -> bool:
        """Whether a session has ended and has no work left anywhere."""
        has_ended = any(each.has_ended(session_id) for each in self._all)
        return has_ended and not any(each.works_for(session_id) for each in self._all)

    def free(self, session_id: str) -> None:
        """Give back everywhere what a session holds that is over."""
        for each in self._all:
            each.free(session_id)
