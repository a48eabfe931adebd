"""What becomes of an error that nobody foresaw: the work that raised it fails, and nothing else.

Its traceback is in the log under an id that the client is told.
"""

import asyncio
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from spmd_tx.coordinator.runtime import metrics
from spmd_tx.errors import (
    CrashLoop,
    MeshError,
    StartError,
)

logger = logging.getLogger(__name__)

# These end a task, a generation or the server, and are meant to.
MEANT = (
    asyncio.CancelledError,
    GeneratorExit,
    KeyboardInterrupt,
    SystemExit,
    MeshError,
    StartError,
    CrashLoop,
)

LOST = "the server could not carry out this request; its log has the details under this id"
COUNTS = (
    "the request was carried out and counts, but the server could not make its result; its log has the "
    "details under this id"
)


def let_pass(error: BaseException) -> None:
    """Raise an error again that is meant to go further. Foreign code may raise others than Exceptions."""
    if isinstance(error, MEANT):
        raise error


def report(error: BaseException, work: str, consequence: str = LOST) -> str:
    """Write an unforeseen error of some work to the log: what to tell the client. Raises what is meant."""
    let_pass(error)
    metrics.INTERNAL_ERRORS.inc()
    number = secrets.token_hex(6)
    logger.error("internal error %s: %s failed", number, work, exc_info=error)
    return f"internal error {number}: {consequence}"


@contextmanager
def contained(work: str) -> Iterator[None]:
    """For work that nobody waits for: an unforeseen error is in the log, and that is all."""
    try:
        yield
    except BaseException as error:
        report(error, work)
