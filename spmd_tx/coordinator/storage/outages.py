"""Trying again for as long as database or disk do not answer, or the disk is full."""

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

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

OUTAGES = (OSError, SQLAlchemyError)  # what may go away without anybody's doing


logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
READ_AGAIN_SECONDS = 1.0  # after something could not be read

# Not EIO: a sector that cannot be read stays so.
OF_DISKS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.ENFILE, errno.EMFILE))
OF_STATEMENTS = (IntegrityError, ProgrammingError, DataError, NotSupportedError, NoResultFound)
OF_VALUES = ("22", "23")  # classes of SQLSTATE: data exception, integrity constraint violation

Result = TypeVar("Result")


def is_outage(error: BaseException) -> bool:
    """Whether an error may go away without anybody's doing anything to the request."""
    if isinstance(error, OSError):
        return isinstance(error, ConnectionError | TimeoutError) or error.errno in OF_DISKS
    return isinstance(error, SQLAlchemyError) and not _is_of_statement(error)


def _is_of_statement(error: SQLAlchemyError) -> bool:
    """Whether what was sent, or could not be sent, is at fault, and not the connection or the database."""
    if isinstance(error, OF_STATEMENTS):
        return True
    if not isinstance(error, DBAPIError):
        return isinstance(error, StatementError)
    original = error.orig  # PostgreSQL's driver has no classes for these
    is_unsendable = isinstance(original.__cause__ if original else None, ValueError)
    return is_unsendable or (getattr(original, "sqlstate", None) or "")[:2] in OF_VALUES


async def retry_through_outages(
    work: Callable[[], Awaitable[Result]], is_pointless: Callable[[], bool] = lambda: False
) -> Result:
    """Do something that may be done twice, again and again until database and disk answer.

    Raises MeshError when it ``is_pointless`` to go on, because the workers it was for are lost.
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
    """Read something, again and again while database or disk do not answer, but not longer; then None."""
    deadline = asyncio.get_running_loop().time() + seconds
    while True:
        try:
            return await read()
        except OUTAGES as error:
            logger.warning("cannot read now: %s", error)
        if asyncio.get_running_loop().time() + READ_AGAIN_SECONDS > deadline:
            return None
        await asyncio.sleep(READ_AGAIN_SECONDS)


async def uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Do something to its end, whoever loses patience."""
    task = asyncio.create_task(work)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            continue
