"""Writes the events of a stream of OpenAI's Responses. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, assert_never

from msgspec.structs import replace

from spmd_tx.coordinator.http.openai import errors
from spmd_tx.coordinator.http.openai import response_schemas as schemas
from spmd_tx.coordinator.http.openai.completion_events import KEEP_ALIVE
from spmd_tx.coordinator.http.openai.response_items import ResponseHead
from spmd_tx.coordinator.http.text_generation.choices import ChoiceTokens
from spmd_tx.coordinator.http.text_generation.event_streams import named_event
from spmd_tx.coordinator.http.text_generation.generation import TokenUsage
from spmd_tx.coordinator.http.text_generation.replies import NumberedCall, ReplyPart, joined
from spmd_tx.coordinator.text.reply_events import Reasoning

OVERLOADED, SERVER_ERROR, INVALID = "server_is_overloaded", "server_error", "invalid_prompt"


@dataclass
class ResponseEvents:
    """Writes one stream. A text is sent as it comes, a call when it is complete."""

    head: ResponseHead
    _numbers: Iterator[int] = field(default_factory=count)
    _items: list[schemas.OutputItem] = field(default_factory=list)
    _open: list[ReplyPart] = field(default_factory=list)  # the parts of the item that is being written
    _finish: str = ""

    def opening(self) -> bytes:
        answer = self.head.answer()
        return b"".join(
            self._event(f"response.{kind}", response=answer) for kind in ("created", "in_progress")
        )

    def piece(self, piece: Sequence[ChoiceTokens]) -> bytes:
        texts = list[bytes]()
        for tokens in piece:
            delta = tokens.choice.delta(tokens)
            texts += [self._part(part) for part in delta.reply]
            self._finish = delta.finish_reason or self._finish
        return b"".join(texts)

    def keep_alive(self) -> bytes:
        return KEEP_ALIVE

    def closing(self, usage: TokenUsage) -> bytes:
        text = self._close_item()
        answer = self.head.ended(self._items, self._finish, usage)
        return text + self._event(f"response.{answer.status}", response=answer)

    def failure(self, message: str, status: int) -> bytes:
        error = schemas.ResponseError(_code(message, status), message)
        answer = replace(self.head.answer(), status="failed", error=error, output=self._items)
        return self._event("response.failed", response=answer)

    def _part(self, part: ReplyPart) -> bytes:
        text = b""
        if not self._open or type(self._open[0]) is not type(part) or isinstance(part, NumberedCall):
            text = self._close_item() + self._open_item(part)
        self._open.append(part)
        return text + self._delta(part)

    def _open_item(self, part: ReplyPart) -> bytes:
        item = self.head.item(part, len(self._items))
        at = self._at(item)
        match item:
            case schemas.ReasoningItem():
                kind, at["summary_index"], begun = "reasoning_summary_part", 0, replace(item, summary=())
                inner = schemas.SummaryText("")
            case schemas.MessageItem():
                kind, at["content_index"] = "content_part", 0
                begun, inner = replace(item, status="in_progress", content=()), schemas.OutputText("")
            case schemas.FunctionCallItem():
                kind, inner = None, None
                begun = replace(item, status="in_progress", arguments="")
            case _:
                assert_never(item)
        added = self._event("response.output_item.added", output_index=at["output_index"], item=begun)
        return added + (b"" if kind is None else self._event(f"response.{kind}.added", part=inner, **at))

    def _delta(self, part: ReplyPart) -> bytes:
        at = self._at(self.head.item(part, len(self._items)))
        if isinstance(part, NumberedCall):
            return self._event("response.function_call_arguments.delta", delta=part.call.arguments, **at)
        if isinstance(part, Reasoning):
            return self._event(
                "response.reasoning_summary_text.delta", summary_index=0, delta=part.text, **at
            )
        return self._event("response.output_text.delta", content_index=0, delta=part.text, logprobs=(), **at)

    def _close_item(self) -> bytes:
        if not self._open:
            return b""
        (part,) = joined(self._open)
        index, self._open = len(self._items), []
        item = self.head.item(part, index)
        done = b"".join(self._done(item))
        self._items.append(item)
        return done + self._event("response.output_item.done", output_index=index, item=item)

    def _done(self, item: schemas.OutputItem) -> Iterator[bytes]:
        at = self._at(item)
        match item:
            case schemas.ReasoningItem():
                part = item.summary[0]
                at["summary_index"] = 0
                yield self._event("response.reasoning_summary_text.done", text=part.text, **at)
                yield self._event("response.reasoning_summary_part.done", part=part, **at)
            case schemas.MessageItem():
                part = item.content[0]
                at["content_index"] = 0
                yield self._event("response.output_text.done", text=part.text, logprobs=(), **at)
                yield self._event("response.content_part.done", part=part, **at)
            case schemas.FunctionCallItem():
                yield self._event(
                    "response.function_call_arguments.done", name=item.name, arguments=item.arguments, **at
                )
            case _:
                assert_never(item)

    def _at(self, item: schemas.OutputItem) -> dict[str, Any]:
        """Return where an item stands."""
        return {"item_id": item.id, "output_index": len(self._items)}

    def _event(self, kind: str, **fields: Any) -> bytes:
        content = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return named_event(kind, content)


def _code(message: str, status: int) -> str:
    """Return the code of an error that ends a stream."""
    if status == errors.UNAVAILABLE:
        return OVERLOADED
    other = SERVER_ERROR if status >= errors.INTERNAL else INVALID
    return errors.error_body(message, status).error.code or other
