"""Writes what a model has replied as a message of Anthropic's API, whole or as events. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from msgspec import Raw

from spmd_tx.coordinator.conversation.messages_reader import CALL_ID, TOOL_USE_ID
from spmd_tx.coordinator.http.anthropic import schemas
from spmd_tx.coordinator.http.anthropic.errors import error_body
from spmd_tx.coordinator.http.anthropic.schemas import Block, MessageStopReason
from spmd_tx.coordinator.http.text_generation.choices import ChoiceTokens
from spmd_tx.coordinator.http.text_generation.event_streams import named_event
from spmd_tx.coordinator.http.text_generation.generation import TokenUsage
from spmd_tx.coordinator.http.text_generation.replies import NumberedCall, ReplyPart
from spmd_tx.coordinator.http.text_generation.whole_replies import WholeReply
from spmd_tx.coordinator.text.reply_events import Reasoning, ReplyContent

STOP_REASONS: dict[str, MessageStopReason] = {
    "stop": "end_turn",
    "tool_calls": "tool_use",
    "length": "max_tokens",
}


@dataclass(frozen=True)
class MessageHead:
    """Holds what is known of a message before it is drawn."""

    id: str
    model: str
    seal: str  # of the turn
    prompt_tokens: int

    def message(
        self,
        content: Sequence[Block],
        usage: schemas.MessageUsage,
        stop_reason: MessageStopReason | None = None,
        stop_sequence: str | None = None,
    ) -> schemas.AssistantMessage:
        return schemas.AssistantMessage(
            id=self.id,
            model=self.model,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=usage,
        )


def whole_message(head: MessageHead, reply: WholeReply) -> schemas.AssistantMessage:
    """Return the message of a whole reply."""
    blocks = [_block(part, head.seal) for part in reply.parts]
    return head.message(blocks, _usage(reply.usage), stop_reason(reply.finish, reply.stop), reply.stop)


def stop_reason(finish: str, stop: str | None) -> MessageStopReason:
    return "stop_sequence" if stop is not None and finish == "stop" else STOP_REASONS[finish]


def _block(part: ReplyPart, seal: str) -> Block:
    match part:
        case Reasoning():
            return schemas.ThinkingBlock(part.text, seal)
        case ReplyContent():
            return schemas.TextBlock(part.text)
        case NumberedCall():
            return schemas.ToolUseBlock(_id(part), part.call.name, Raw(part.call.arguments.encode()))
        case _:
            assert_never(part)


def _id(call: NumberedCall) -> str:
    return TOOL_USE_ID + call.id.removeprefix(CALL_ID)


def _usage(spent: TokenUsage) -> schemas.MessageUsage:
    return schemas.MessageUsage(spent.prompt - spent.cached, spent.cached, spent.sampled)


@dataclass
class MessageEvents:
    """Writes one stream. Its message begins with the first token: by then it is known what was cached."""

    head: MessageHead
    cached_tokens: Callable[[], int]
    _has_begun: bool = False
    _open: type[ReplyPart] | None = None  # the kind of the block that is being written
    _index: int = 0  # of that block
    _finish: str = ""
    _stop: str | None = None
    _events: list[bytes] = field(default_factory=list)

    def opening(self) -> bytes:
        return b""

    def piece(self, piece: Sequence[ChoiceTokens]) -> bytes:
        for tokens in piece:
            delta = tokens.choice.delta(tokens)
            for part in delta.reply:
                self._write(part)
            if delta.finish_reason is not None:
                self._finish, self._stop = delta.finish_reason, delta.stop
        return self._take()

    def keep_alive(self) -> bytes:
        self._events.append(_event("ping"))
        return self._take()

    def closing(self, usage: TokenUsage) -> bytes:
        self._close_block()
        end = {"stop_reason": stop_reason(self._finish, self._stop), "stop_sequence": self._stop}
        self._events += [_event("message_delta", delta=end, usage=_usage(usage)), _event("message_stop")]
        return self._take()

    def failure(self, message: str, status: int) -> bytes:
        return named_event("error", error_body(message, status))

    def _write(self, part: ReplyPart) -> None:
        block, delta = _streamed(part)
        if type(part) is not self._open or isinstance(part, NumberedCall):
            self._close_block()
            self._open = type(part)
            self._events.append(_event("content_block_start", index=self._index, content_block=block))
        self._events.append(_event("content_block_delta", index=self._index, delta=delta))

    def _close_block(self) -> None:
        if self._open is None:
            return
        if self._open is Reasoning:
            seal = {"type": "signature_delta", "signature": self.head.seal}
            self._events.append(_event("content_block_delta", index=self._index, delta=seal))
        self._events.append(_event("content_block_stop", index=self._index))
        self._index, self._open = self._index + 1, None

    def _take(self) -> bytes:
        events, self._events = b"".join(self._events), []
        if self._has_begun:
            return events
        self._has_begun, cached = True, self.cached_tokens()
        usage = schemas.MessageUsage(self.head.prompt_tokens - cached, cached, 0)
        return _event("message_start", message=self.head.message([], usage)) + events


def _streamed(part: ReplyPart) -> tuple[Block, dict[str, str]]:
    """Return the block that a part begins, without content, and the delta with the part itself."""
    match part:
        case Reasoning():
            return schemas.ThinkingBlock("", ""), {"type": "thinking_delta", "thinking": part.text}
        case ReplyContent():
            return schemas.TextBlock(""), {"type": "text_delta", "text": part.text}
        case NumberedCall():
            block = schemas.ToolUseBlock(_id(part), part.call.name, Raw(b"{}"))
            return block, {"type": "input_json_delta", "partial_json": part.call.arguments}
        case _:
            assert_never(part)


def _event(kind: str, **fields: object) -> bytes:
    return named_event(kind, {"type": kind, **fields})
