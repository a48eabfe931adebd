"""Fields of Responses that have no effect here: which are taken, with which values, and why. Pure."""

from spmd_tx.coordinator.http.openai.response_schemas import ResponsesRequest
from spmd_tx.coordinator.http.text_generation.field_checks import (
    NOT_OFFERED,
    HarmlessFields,
    check_keys,
    check_text,
)
from spmd_tx.errors import WrongField

HARMLESS = HarmlessFields(
    labels=frozenset(
        {
            "metadata",  # labels of stored answers, and none are stored
            "client_metadata",  # the same
            "user",  # names the caller's user; owners are known by their keys
            "safety_identifier",  # the same
            "prompt_cache_key",  # routes calls to a cache; prefixes are always cached here
            "prompt_cache_retention",  # the same
            "prompt_cache_options",  # the same
        }
    ),
    defaults={
        "background": (False,),
        "service_tier": ("auto", "default"),
        "truncation": ("disabled",),
        "top_logprobs": (0,),
        "stream_options": ({}, {"include_obfuscation": False}),
        "max_tool_calls": (),
        "conversation": (),
        "context_management": ([],),
        "prompt": (),
        "moderation": (),
    },
    remedies={
        "conversation": "send the whole conversation as input",
        "truncation": "shorten the conversation in the client",
        "top_logprobs": "send the conversation to chat/completions",
    },
)
# All reasoning is in the summary.
FORMAT_FIELDS = frozenset({"type", "name", "description", "schema", "strict"})
REASONING_FIELDS = frozenset({"effort", "summary", "generate_summary"})
LOGPROBS = "message.output_text.logprobs"


def check(body: bytes, request: ResponsesRequest) -> None:
    """Refuse fields that would be ignored otherwise. Raises InvalidRequest."""
    HARMLESS.check(body, ResponsesRequest)
    if LOGPROBS in (request.include or ()):
        raise WrongField(
            f"include {LOGPROBS} is not offered by this server; send the conversation to chat/completions",
            "include",
            NOT_OFFERED,
        )
    check_keys(request.reasoning, "reasoning", REASONING_FIELDS)
    check_text(request.reasoning, "reasoning", "effort")
    check_keys(request.text, "text", frozenset({"format", "verbosity"}))
    text = request.text or {}
    if text.get("verbosity") not in (None, "medium"):
        raise WrongField("text.verbosity is not offered by this server; leave it out", "text.verbosity")
    format = text.get("format") or {"type": "text"}
    if not isinstance(format, dict):
        raise WrongField("text.format is no object; send one with a type", "text.format")
    check_keys(format, "text.format", FORMAT_FIELDS)
