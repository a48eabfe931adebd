"""Fails what somebody may be waiting for."""

import asyncio
from typing import Any


def fail(answer: asyncio.Future[Any], error: BaseException) -> None:
    """Fail a future, unless it is done. No warning is logged if nobody awaits it."""
    if not answer.done():
        answer.set_exception(error)
        answer.exception()
