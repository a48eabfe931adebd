"""The outcome of a request whose work has raised an error."""

from spmd_tx.coordinator.requests.records import Failed, Request
from spmd_tx.coordinator.runtime.containment import COUNTS, LOST, report
from spmd_tx.errors import Abandoned, CompileFailed, DamagedBody, RequestError


def failure(error: BaseException, work: str, *, executed: bool = False, layout: str | None = None) -> Failed:
    """The outcome of a request whose work has raised it; ``executed`` if its commands count all the same."""
    return Failed(report(error, work, COUNTS if executed else LOST), "server", executed, layout)


def failed_by(
    error: BaseException, request: Request, executed: bool = False, layout: str | None = None
) -> Failed:
    """The outcome of a request for any error; ``executed`` if its commands are out, and count."""
    match error:
        case RequestError():
            return Failed(str(error), "user", executed, layout)
        case CompileFailed():  # nothing of it was sent
            return Failed(str(error), "server")
        case OSError() | DamagedBody():
            why = f"the server cannot read or write its data: {error}"
            return Failed(why, "server", executed, layout)
        case Abandoned():
            return Failed(str(error), "server", executed, layout)
    name = f"{request.kind} {request.seq_id} of {request.line} (request {request.id})"
    return failure(error, name, executed=executed, layout=layout)
