"""Trying again for as long as database or disk do not answer, or the disk is full."""

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.exc import DataError, IntegrityError, NotSupportedError, ProgrammingError, SQLAlchemyError

from spmd_tx.errors import MeshError

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0

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
