"""What sampling hands to the scheduler: one command to send, its cost, and how its reply ends requests."""

from collections.abc import Callable
from dataclasses import dataclass

from spmd_tx.coordinator.requests.records import Outcome
from spmd_tx.protocol import AnyCommand
from spmd_tx.reports import Reply


@dataclass(frozen=True)
class Dispatch:
    """A command that is ready to be sent."""

    command: AnyCommand
    tokens: int  # what it costs, for fair shares
    absorb: Callable[[Reply], list[tuple[str, Outcome]]]  # finished requests: (request_id, outcome)
    requests: frozenset[str] = frozenset()  # whose samples it works on
