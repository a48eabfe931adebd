"""Trying again for as long as the database does not answer."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from spmd_tx.errors import MeshError

logger = logging.getLogger(__name__)

OUTAGES = (SQLAlchemyError, ConnectionError, TimeoutError)
RETRY_SECONDS = 1.0

Result = TypeVar("Result")


async def patiently(
    work: Callable[[], Awaitable[Result]], is_pointless: Callable[[], bool] = lambda: False
) -> Result:
    """Do something that may be done twice, again and again until the database answers.

    Raises MeshError when it ``is_pointless`` to go on, because the workers it was for are lost.
    """
    while True:
        try:
            return await work()
        except OUTAGES as error:
            logger.warning("the database does not answer, trying again: %s", error)
        await asyncio.sleep(RETRY_SECONDS)
        if is_pointless():
            raise MeshError("the workers were lost while the database did not answer")
