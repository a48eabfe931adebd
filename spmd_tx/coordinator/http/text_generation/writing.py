"""Writes answers piece by piece outside the event loop: a large one neither fills memory nor holds others up.

Only one piece with likeliest tokens is written at a time: threads that compute are slow to hand over the
interpreter.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from litestar import Response
from litestar.background_tasks import BackgroundTask
from litestar.response import Stream

from spmd_tx.coordinator.http.text_generation.choices import ChoiceTokens
from spmd_tx.coordinator.wire.training_protobuf import JSON

SHORT_BYTES = 256 << 10  # of an answer that is sent at once
SMALL_COST = 1024  # about a millisecond's work, for which a thread costs more than it saves

Written = TypeVar("Written")

_wide = ThreadPoolExecutor(1, thread_name_prefix="likeliest")


async def write(
    piece: Sequence[ChoiceTokens], written: Callable[[Sequence[ChoiceTokens]], Written]
) -> Written:
    """Call ``written`` with a piece, in a thread unless it is small."""
    if sum(part.cost for part in piece) <= SMALL_COST:
        return written(piece)
    is_wide = any(part.top is not None for part in piece)
    return await asyncio.get_running_loop().run_in_executor(_wide if is_wide else None, written, piece)


async def response(texts: AsyncIterator[bytes], close: Callable[[], None]) -> Response[Any]:
    """Send an answer with its length if it is short, and else as it is written."""
    begun, size = list[bytes](), 0
    async for text in texts:
        begun.append(text)
        size += len(text)
        if size > SHORT_BYTES:
            return Stream(_continued(begun, texts, close), media_type=JSON, background=BackgroundTask(close))
    close()
    return Response(b"".join(begun), media_type=JSON)


async def _continued(
    begun: Sequence[bytes], texts: AsyncIterator[bytes], close: Callable[[], None]
) -> AsyncIterator[bytes]:
    try:
        for text in begun:
            yield text
        async for text in texts:
            yield text
    finally:
        close()
