"""Tells outages of the database and the disk from other errors, and tries again until they end."""

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    NoResultFound,
    NotSupportedError,
    ProgrammingError,
    SQLAlchemyError,
    StatementError,
)

from spmd_tx.errors import MeshError

logger = logging.getLogger(__name__)

OUTAGES = (OSError, SQLAlchemyError)  # errors that may pass by themselves

RETRY_SECONDS = 1.0
READ_AGAIN_SECONDS = 1.0  # after a failed read

# EIO is missing: an unreadable sector stays unreadable.
DISK_ERRNOS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.ENFILE, errno.EMFILE))
STATEMENT_ERRORS = (IntegrityError, ProgrammingError, DataError, NotSupportedError, NoResultFound)
VALUE_SQLSTATES = ("22", "23")  # classes of SQLSTATE: data exception, integrity constraint violation

Result = TypeVar("Result")


def is_outage(error: BaseException) -> bool:
    """Whether an error may pass by itself, so that the same work may succeed later."""
    if isinstance(error, OSError):
        return isinstance(error, ConnectionError | TimeoutError) or error.errno in DISK_ERRNOS
    return isinstance(error, SQLAlchemyError) and not _is_of_statement(error)


def _is_of_statement(error: SQLAlchemyError) -> bool:
    """Whether the statement or its values are at fault, and not the connection or the database."""
    if isinstance(error, STATEMENT_ERRORS):
        return True
    if not isinstance(error, DBAPIError):
        return isinstance(error, StatementError)
    original = error.orig  # PostgreSQL's driver has no classes for these
    is_unsendable = isinstance(original.__cause__ if original else None, ValueError)
    return is_unsendable or (getattr(original, "sqlstate", None) or "")[:2] in VALUE_SQLSTATES


async def retry_through_outages(
    work: Callable[[], Awaitable[Result]], is_pointless: Callable[[], bool] = lambda: False
) -> Result:
    """Repeat idempotent work until database and disk answer.

    Raises MeshError once ``is_pointless`` says that the workers it was for are lost.
    """
    while True:
        try:
            return await work()
        except (OSError, SQLAlchemyError) as error:
            if not is_outage(error):
                raise
            logger.warning("database or disk do not answer, trying again: %s", error)
        await asyncio.sleep(RETRY_SECONDS)
        if is_pointless():
            raise MeshError("the workers were lost while database or disk did not answer")


async def read_before_deadline(seconds: float, read: Callable[[], Awaitable[Result]]) -> Result | None:
    """Repeat a read while database or disk do not answer; None after ``seconds``."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            return await read()
        except OUTAGES as error:
            logger.warning("cannot read now: %s", error)
        if asyncio.get_running_loop().time() + READ_AGAIN_SECONDS > deadline:
            return None
        await asyncio.sleep(READ_AGAIN_SECONDS)
