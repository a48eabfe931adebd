"""Turns an error into the outcome of the request whose work raised it."""

from spmd_tx.coordinator.requests.records import Failed, Request
from spmd_tx.coordinator.runtime.containment import EXECUTED_WITHOUT_RESULT, NOT_EXECUTED, report
from spmd_tx.errors import Abandoned, DamagedBody, NotLoaded, NotSent, RequestError


def failure(error: BaseException, work: str, *, executed: bool = False, layout: str | None = None) -> Failed:
    """The outcome for an unforeseen error; ``executed`` if the request's commands count all the same."""
    consequence = EXECUTED_WITHOUT_RESULT if executed else NOT_EXECUTED
    return Failed(report(error, work, consequence), "server", executed, layout)


def failed_by(
    error: BaseException, request: Request, executed: bool = False, layout: str | None = None
) -> Failed:
    """The outcome of a request for any error; ``executed`` if its commands were sent, and count."""
    match error:
        case RequestError():
            return Failed(str(error), "user", executed, layout)
        case NotLoaded():
            return Failed(str(error), error.fault)
        case NotSent():  # no command was sent
            return Failed(str(error), "server")
        case OSError() | DamagedBody():
            why = f"the server cannot read or write its data: {error}"
            return Failed(why, "server", executed, layout)
        case Abandoned():
            return Failed(str(error), "server", executed, layout)
    name = f"{request} (request {request.id})"
    return failure(error, name, executed=executed, layout=layout)
