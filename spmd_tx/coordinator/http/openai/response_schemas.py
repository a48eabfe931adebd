"""OpenAI's wire format: Responses. Requests hold the fields that have an effect here.

Null has the same meaning as a missing field; response_fields.py judges all others.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from spmd_tx.coordinator.http.text_generation.field_types import (
    Count,
    Seed,
    Temperature,
    TopProbability,
)
from spmd_tx.coordinator.wire.fields import Text

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class ResponsesRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for the assistant's next turn; conversation/responses_reader.py reads its input and tools."""

    model: Text
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopProbability | None = None
    seed: Seed | None = None  # not of this API, but of the others
    stream: bool | None = None
    include: list[str] | None = None
    previous_response_id: Text | None = None
    store: bool | None = None  # whether a later request may name the answer


# --- items ------------------------------------------------------------------------------------------


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[()] = ()


class SummaryText(msgspec.Struct, frozen=True, tag_field="type", tag="summary_text"):
    text: str


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    id: str
    summary: Sequence[SummaryText]
    encrypted_content: str  # the seal of the turn


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    content: Sequence[OutputText]
    status: ResponseStatus
    role: Literal["assistant"] = "assistant"


class FunctionCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ResponseStatus
    namespace: str | UnsetType = UNSET


OutputItem = ReasoningItem | MessageItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Is an answer, or its state in an event."""

    id: str
    object: Literal["response"] = "response"
    created_at: int  # seconds since the epoch
    status: ResponseStatus
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str] = {}
    model: str
    output: Sequence[OutputItem] = ()
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    store: bool
    temperature: float | None
    tool_choice: str
    tools: Sequence[dict[str, Any]]
    top_p: float | None
    usage: ResponseUsage | None = None
