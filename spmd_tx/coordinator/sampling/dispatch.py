"""A command of a batch of samples, and what becomes of its reply."""

from collections.abc import Callable
from dataclasses import dataclass

from spmd_tx.coordinator.requests.records import Outcome
from spmd_tx.protocol.commands import AnyCommand
from spmd_tx.protocol.reports import Reply

Absorb = Callable[[Reply], list[tuple[str, Outcome]]]  # returns finished requests: (request_id, outcome)


@dataclass(frozen=True)
class Dispatch:
    """Holds a command that is ready to be sent."""

    command: AnyCommand
    absorb: Absorb
    requests: frozenset[str] = frozenset()  # ids of the requests whose samples it works on
