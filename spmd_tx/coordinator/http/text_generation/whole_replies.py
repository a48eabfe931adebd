"""Waits for the one reply of a call, for answers that are no streams."""

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


async def whole_reply(call: TextGeneration, request: Request[Any, Any, Any]) -> WholeReply:
    """Return the reply of a call with one choice, unless the client disconnects."""
    try:
        await call.stream.finished(request)
        deltas = [
            delta async for piece in call.stream.pieces(call.choices) for delta in await write(piece, _deltas)
        ]
        last = deltas[-1]
        assert last.finish_reason is not None
        parts = joined([part for delta in deltas for part in delta.reply])
        return WholeReply(parts, last.finish_reason, last.stop, await call.usage())
    finally:
        call.stream.close()


def _deltas(piece: Sequence[ChoiceTokens]) -> list[TextDelta]:
    return [part.choice.delta(part) for part in piece]
