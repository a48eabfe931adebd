"""Sends samples as server-sent events while they are drawn. A generation that fails ends with an error."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec
from litestar.background_tasks import BackgroundTask
from litestar.response import Stream
from litestar.status_codes import HTTP_500_INTERNAL_SERVER_ERROR

from spmd_tx.coordinator.http.errors import status_of
from spmd_tx.coordinator.http.text_generation.choices import ChoiceTokens
from spmd_tx.coordinator.http.text_generation.generation import TextGeneration, TokenUsage
from spmd_tx.coordinator.http.text_generation.sample_stream import KEEP_ALIVE_SECONDS
from spmd_tx.coordinator.http.text_generation.writing import write
from spmd_tx.coordinator.runtime import containment
from spmd_tx.errors import SpmdTxError


class EventFormat(Protocol):
    """Writes the events of one stream in a dialect."""

    def opening(self) -> bytes:
        """Return the events before the first token."""
        ...

    def piece(self, piece: Sequence[ChoiceTokens]) -> bytes:
        """Return the events of further tokens; none if they say nothing."""
        ...

    def keep_alive(self) -> bytes: ...

    def closing(self, usage: TokenUsage) -> bytes:
        """Return the last events of a stream that is complete."""
        ...

    def failure(self, message: str, status: int) -> bytes:
        """Return the last events of a stream that failed; its own status has been sent already."""
        ...


def stream_events(generation: TextGeneration, form: EventFormat) -> Stream:
    """Answer with the events of a generation."""
    # The background task closes it even if nobody begins to read the stream.
    return Stream(
        _events(generation, form),
        media_type="text/event-stream",
        background=BackgroundTask(generation.stream.close),
    )


async def _events(generation: TextGeneration, form: EventFormat) -> AsyncIterator[bytes]:
    clock = asyncio.get_running_loop().time
    last = clock()
    try:
        if text := form.opening():
            yield text
        async for piece in generation.stream.news(generation.choices):
            text = b"" if piece is None else await write(piece, form.piece)
            if piece is None or (not text and clock() - last > KEEP_ALIVE_SECONDS):  # a long call is written
                text = form.keep_alive()
            if text:
                last = clock()
                yield text
        text = form.closing(await generation.usage())
    except SpmdTxError as error:
        text = form.failure(str(error), status_of(error))
    except BaseException as error:
        problem = containment.report(error, f"the stream of {', '.join(generation.stream.request_ids[:1])}")
        text = form.failure(problem, HTTP_500_INTERNAL_SERVER_ERROR)
    finally:
        generation.stream.close()
    yield text


def named_event(name: str, content: object) -> bytes:
    """Write a server-sent event of a name."""
    return f"event: {name}\ndata: ".encode() + msgspec.json.encode(content) + b"\n\n"
