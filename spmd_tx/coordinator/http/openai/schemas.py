"""OpenAI's wire format: completions and chat completions. Requests hold the fields that have an effect here.

Null has the same meaning as a missing field; fields.py judges all others. Some fields are not OpenAI's; other
servers of open models take them under the same names.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from spmd_tx.coordinator.http.text_generation.field_types import (
    Count,
    Seed,
    StopString,
    Temperature,
    TopCount,
    TopProbability,
)
from spmd_tx.coordinator.wire.fields import Text

ChoiceCount = Annotated[int, Meta(ge=1, le=128)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]

CompletionFinish = Literal["stop", "length"]
ChatFinish = Literal["stop", "length", "tool_calls"]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what both kinds of request have in common."""

    model: Text
    n: ChoiceCount | None = None
    max_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopProbability | None = None
    top_k: TopCount | None = None
    seed: Seed | None = None
    stop: StopString | StopStrings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    regex: str | None = None  # the whole answer must match it
    grammar: str | None = None  # the same, in llguidance's dialect of Lark


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """Names a JSON schema; what else is in it describes the schema to hosted models."""

    schema: dict[str, Any] | None = None
    strict: bool | None = None


class AnswerFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchemaFormat | None = None


class CompletionRequest(Parameters, frozen=True, kw_only=True):
    """Asks for completions. A prompt is text or token IDs; each prompt of a list gets ``n`` choices."""

    prompt: str | list[str | int | list[int]]
    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None  # 0 only scores an echoed prompt
    logprobs: int | None = None  # returned for drawn tokens, and for this many of the likeliest
    echo: bool | None = None  # whether the prompt stands before the answer, with its log-probabilities


class ChatRequest(Parameters, frozen=True, kw_only=True):
    """Asks for a chat completion; conversation/chat_reader.py reads its messages and tools."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: AnswerFormat | None = None
    reasoning_effort: str | None = None  # a variable of the chat template
    chat_template_kwargs: dict[str, Any] | None = None


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int  # found in the prefix cache


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int  # up to the last one with reasoning


class CompletionUsage(msgspec.Struct, frozen=True):
    """Counts tokens. The token that ends a sample counts, too."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


# --- completions ------------------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float]  # NaN, which JSON has as null, for the first token of an echoed prompt
    text_offset: list[int]  # characters
    top_logprobs: list[dict[str, float] | None] | UnsetType | None = None  # by text; with the token itself


class CompletionChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    finish_reason: CompletionFinish | None  # None: more follows
    logprobs: CompletionLogprobs | UnsetType | None = None
    token_ids: list[int] | UnsetType = UNSET


# --- chat completions -------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None  # None: not whole characters


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob] = []
    forced: bool | UnsetType = UNSET  # not of this API: a grammar left no choice


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str  # JSON


class ChatToolCall(msgspec.Struct, frozen=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    role: Literal["assistant"]
    content: str | None  # None: there is none beside calls
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: ChatMessage
    finish_reason: ChatFinish | None
    logprobs: ChatLogprobs | UnsetType | None = None
    token_ids: list[int] | UnsetType = UNSET


class ToolCallBegin(msgspec.Struct, frozen=True):
    index: int
    id: str
    function: FunctionCall  # without arguments yet
    type: Literal["function"] = "function"


class ArgumentsDelta(msgspec.Struct, frozen=True):
    arguments: str


class ToolCallArguments(msgspec.Struct, frozen=True):
    index: int
    function: ArgumentsDelta


class ChatDelta(msgspec.Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET  # in the first event of a choice
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallBegin | ToolCallArguments] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: ChatDelta
    finish_reason: ChatFinish | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


# --- both -------------------------------------------------------------------------------------------

ResponseKind = Literal["text_completion", "chat.completion", "chat.completion.chunk"]


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Is an answer, or one event of a stream, of either kind of request."""

    id: str
    object: ResponseKind
    created: int  # seconds since the epoch
    model: str
    prompt_token_ids: list[int] | UnsetType = UNSET
    choices: Sequence[CompletionChoice | ChatChoice | ChatChunkChoice]
    usage: CompletionUsage | UnsetType = UNSET


# --- models and errors ------------------------------------------------------------------------------


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    created: int  # seconds since the epoch; 0: unknown
    object: Literal["model"] = "model"
    owned_by: str = "spmd_tx"


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    code: str | None = None
    param: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail
