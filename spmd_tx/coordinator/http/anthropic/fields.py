"""Fields of Anthropic's requests that have no effect here: which are taken, with which values, and why. Pure.

A field without an entry is refused by its name: it would change an answer elsewhere, or is misspelled.
"""

from collections.abc import Mapping
from typing import Any

from spmd_tx.coordinator.http.anthropic.schemas import Prompting
from spmd_tx.coordinator.http.text_generation.field_checks import HarmlessFields, check_keys, check_text
from spmd_tx.errors import WrongField

HARMLESS = HarmlessFields(
    labels=frozenset(
        {
            "metadata",  # names the caller's user; owners are known by their keys
            "cache_control",  # marks what a cache should keep; prefixes are always cached here
            "context_management",  # when a server may shorten a conversation; this one never does
            "diagnostics",  # what a server may report of its cache
            "betas",  # names of what is tried there
        }
    ),
    defaults={
        "service_tier": ("auto", "standard_only"),
        "speed": ("standard",),
        "mcp_servers": ([],),
        "container": (),
        "fallbacks": ([],),
        "inference_geo": (),
        "output_format": (),
    },
    remedies={
        "mcp_servers": "connect to them in the client, and send their tools",
        "container": "nothing is run by this server; leave it out",
        "output_format": "ask for the format in a message",
    },
)
THINKING_TYPES = ("enabled", "disabled", "adaptive")
# Lengths of the reasoning are not limited apart from the answer, and all of it is shown.
THINKING_FIELDS = frozenset({"type", "budget_tokens", "display"})
CHOICES = ("auto", "none", "any", "tool")


def check(body: bytes, request: Prompting) -> None:
    """Refuse fields that would be ignored otherwise. Raises InvalidRequest."""
    HARMLESS.check(body, type(request))
    check_keys(request.thinking, "thinking", THINKING_FIELDS)
    if request.thinking is not None and request.thinking.get("type") not in THINKING_TYPES:
        raise WrongField(
            f"thinking.type is {request.thinking.get('type')!r:.80}; send one of {', '.join(THINKING_TYPES)}",
            "thinking.type",
        )
    check_keys(request.output_config, "output_config", frozenset({"effort", "format"}))
    check_text(request.output_config, "output_config", "effort")
    _check_choice(request.tool_choice)


def _check_choice(choice: Mapping[str, Any] | None) -> None:
    check_keys(choice, "tool_choice", frozenset({"type", "name", "disable_parallel_tool_use"}))
    kind = "auto" if choice is None else choice.get("type")
    if kind not in CHOICES:
        raise WrongField(
            f"tool_choice.type is {kind!r:.80}; send one of {', '.join(CHOICES)}", "tool_choice.type"
        )
