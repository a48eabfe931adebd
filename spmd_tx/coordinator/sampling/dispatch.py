"""A command of a batch of samples, and what becomes of its reply."""

from collections.abc import Callable
from typing import NamedTuple

from spmd_tx.coordinator.requests.failures import failure
from spmd_tx.coordinator.requests.records import Failed, Outcome
from spmd_tx.errors import RequestError
from spmd_tx.protocol.commands import AnyCommand
from spmd_tx.protocol.reports import Reply

Absorb = Callable[[Reply], list[tuple[str, Outcome]]]  # returns finished requests: (request_id, outcome)


class Dispatch(NamedTuple):
    """Holds a command that is ready to be sent."""

    command: AnyCommand
    absorb: Absorb
    requests: frozenset[str] = frozenset()  # ids of the requests whose samples it works on


def failed(request_id: str, error: BaseException) -> Failed:
    """Return the outcome of a sample request at whose work an error was raised."""
    if isinstance(error, RequestError):  # a grammar that cannot be followed
        return Failed(str(error), "user")
    return failure(error, f"sample request {request_id}")
