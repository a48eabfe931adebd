"""Waits for the one reply of a generation, for answers that are no streams."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from litestar import Request

from spmd_tx.coordinator.http.text_generation.choices import ChoiceTokens, TextDelta
from spmd_tx.coordinator.http.text_generation.generation import TextGeneration, TokenUsage
from spmd_tx.coordinator.http.text_generation.replies import ReplyPart, joined
from spmd_tx.coordinator.http.text_generation.writing import write


@dataclass(frozen=True)
class WholeReply:
    """Holds a reply from its beginning to its end."""

    parts: Sequence[ReplyPart]
    finish: Literal["stop", "length", "tool_calls"]
    stop: str | None  # the stop string that has ended it
    usage: TokenUsage


async def whole_reply(generation: TextGeneration, request: Request[Any, Any, Any]) -> WholeReply:
    """Return the reply of a generation with one choice, unless the client disconnects."""
    try:
        await generation.stream.finished(request)
        deltas = [
            delta
            async for piece in generation.stream.pieces(generation.choices)
            for delta in await write(piece, _deltas)
        ]
        last = deltas[-1]
        assert last.finish_reason is not None
        parts = joined([part for delta in deltas for part in delta.reply])
        return WholeReply(parts, last.finish_reason, last.stop, await generation.usage())
    finally:
        generation.stream.close()


def _deltas(piece: Sequence[ChoiceTokens]) -> list[TextDelta]:
    return [part.choice.delta(part) for part in piece]
