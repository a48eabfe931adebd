"""Contains unforeseen errors: the work that raised one fails, and nothing else does.

The log has the traceback under an id, and the client is told that id.
"""

import asyncio
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from spmd_tx.coordinator.runtime import metrics
from spmd_tx.errors import CrashLoop, MeshError, StartError

logger = logging.getLogger(__name__)

# These end a task, a generation or the server on purpose.
INTENDED = (
    asyncio.CancelledError,
    GeneratorExit,
    KeyboardInterrupt,
    SystemExit,
    MeshError,
    StartError,
    CrashLoop,
)

NOT_EXECUTED = "the server could not carry out this request; its log has the details under this id"
EXECUTED_WITHOUT_RESULT = (
    "the request was carried out and counts, but the server could not make its result; its log has the "
    "details under this id"
)


def let_pass(error: BaseException) -> None:
    """Raise an intended error again. Others may be any BaseException, as foreign code raises them."""
    if isinstance(error, INTENDED):
        raise error


def report(error: BaseException, work: str, consequence: str = NOT_EXECUTED) -> str:
    """Log an unforeseen error of some work; the result is the text for the client. Raises intended errors."""
    let_pass(error)
    metrics.INTERNAL_ERRORS.inc()
    number = secrets.token_hex(6)
    logger.error("internal error %s: %s failed", number, work, exc_info=error)
    return f"internal error {number}: {consequence}"


@contextmanager
def contained(work: str) -> Iterator[None]:
    """Log an unforeseen error of work that nobody waits for, and go on."""
    try:
        yield
    except BaseException as error:
        report(error, work)
