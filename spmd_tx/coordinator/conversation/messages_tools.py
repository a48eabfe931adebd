"""Reads the tools of Anthropic's Messages. Pure; raises InvalidRequest."""

from collections.abc import Sequence
from dataclasses import dataclass

from spmd_tx.coordinator.conversation.messages import Fields, shown
from spmd_tx.coordinator.conversation.tools import Tool
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
    for name, value in fields.items():
        if value is not None and name not in READ and name not in IGNORED:
            raise WrongField(f"{place}.{name} is not known to this server; leave it out", f"{place}.{name}")
    name, description = fields.get("name"), fields.get("description") or ""
    schema = fields.get("input_schema") or {"type": "object", "properties": {}}
    if not (isinstance(name, str) and name and isinstance(description, str)):
        raise WrongField(
            f"{place} has the name {shown(name)} and the description {shown(description)}; send texts", place
        )
    if not isinstance(schema, dict):
        raise WrongField(
            f"{place}.input_schema is {shown(schema)}; send a JSON schema", f"{place}.input_schema"
        )
    return OfferedTool(Tool(name, description, schema), fields.get("defer_loading") is True)
