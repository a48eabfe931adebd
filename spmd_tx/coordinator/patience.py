"""Trying again for as long as database or disk do not answer, or the disk is full."""

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from sqlalchemy.exc import DataError, IntegrityError, NotSupportedError, ProgrammingError, SQLAlchemyError

from spmd_tx.coordinator.storage import OUTAGES
from spmd_tx.errors import MeshError

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
READ_AGAIN_SECONDS = 1.0  # after something could not be read

# Not EIO: a sector that cannot be read stays so.
OF_DISKS = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.ENFILE, errno.EMFILE))
OF_STATEMENTS = (IntegrityError, ProgrammingError, DataError, NotSupportedError)

Result = TypeVar("Result")


def is_outage(error: Exception) -> bool:
    """Whether an error may go away without anybody's doing anything to the request."""
    if isinstance(error, OSError):
        return isinstance(error, ConnectionError | TimeoutError) or error.errno in OF_DISKS
    return isinstance(error, SQLAlchemyError) and not isinstance(error, OF_STATEMENTS)


async def patiently(
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


async def until(seconds: float, read: Callable[[], Awaitable[Result]]) -> Result | None:
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
