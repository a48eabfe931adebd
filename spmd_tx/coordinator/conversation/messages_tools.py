"""Reads the tools of Anthropic's Messages. Pure; raises InvalidRequest."""

from collections.abc import Sequence
from dataclasses import dataclass

from spmd_tx.coordinator.conversation.messages import Fields, Tool, shown
from spmd_tx.coordinator.conversation.reading import function_of, refuse
from spmd_tx.errors import WrongField

CUSTOM = "custom"  # the type of tools that the client runs
READ = frozenset({"type", "name", "description", "input_schema", "defer_loading", "strict"})
# Without effect: marks of caches, when arguments are streamed, and examples.
IGNORED = frozenset({"cache_control", "eager_input_streaming", "input_examples"})


@dataclass(frozen=True)
class OfferedTool:
    """Holds a tool of a request."""

    tool: Tool
    waits: bool  # until a result names it, the model does not see it


def read_tools(tools: Sequence[Fields]) -> list[OfferedTool]:
    """Read the list ``tools`` of a request."""
    return [_tool(f"tools[{number}]", fields) for number, fields in enumerate(tools)]


def _tool(place: str, fields: Fields) -> OfferedTool:
    kind = fields.get("type")
    if kind not in (None, CUSTOM):
        raise WrongField(
            f"{place} is of type {shown(kind)}, which Anthropic's servers run; leave it out", f"{place}.type"
        )
    refuse(place, (key for key, value in fields.items() if value is not None and key not in READ | IGNORED))
    return OfferedTool(function_of(place, fields, "input_schema"), fields.get("defer_loading") is True)
