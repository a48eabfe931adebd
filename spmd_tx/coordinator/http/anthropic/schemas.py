"""Anthropic's wire format: Messages. Requests hold the fields that have an effect here.

Null has the same meaning as a missing field; fields.py judges all others.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw

from spmd_tx.coordinator.http.text_generation.field_types import (
    Count,
    Seed,
    StopString,
    Temperature,
    TopCount,
    TopProbability,
)
from spmd_tx.coordinator.wire.fields import Text

MessageStopReason = Literal["end_turn", "tool_use", "max_tokens", "stop_sequence"]


class Prompting(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what a prompt is made of; conversation/messages_reader.py reads messages, system and tools."""

    model: Text
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesRequest(Prompting, frozen=True, kw_only=True):
    """Asks for the assistant's next message."""

    max_tokens: Count
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopProbability | None = None
    top_k: TopCount | None = None
    seed: Seed | None = None  # not Anthropic's


class TokenCountRequest(Prompting, frozen=True, kw_only=True):
    """Asks how many tokens a prompt has."""


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class MessageUsage(msgspec.Struct, frozen=True):
    """Counts tokens. Those of the prompt are counted once: as read from the cache, or as input."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


# --- blocks -----------------------------------------------------------------------------------------


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str  # the seal of the turn


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Raw  # a JSON object


Block = ThinkingBlock | TextBlock | ToolUseBlock


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: Sequence[Block]
    stop_reason: MessageStopReason | None  # None: more follows
    stop_sequence: str | None
    usage: MessageUsage


# --- models -----------------------------------------------------------------------------------------


class ModelEntry(msgspec.Struct, frozen=True):
    id: str
    display_name: str
    created_at: str  # RFC 3339
    type: Literal["model"] = "model"


class ModelEntries(msgspec.Struct, frozen=True):
    data: list[ModelEntry]
    first_id: str | None
    last_id: str | None
    has_more: bool = False
