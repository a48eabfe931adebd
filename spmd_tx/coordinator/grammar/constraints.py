"""What a client demands of the form of an answer, in no dialect. Pure; raises WrongField."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from spmd_tx.coordinator.conversation.messages import Tool, shown
from spmd_tx.errors import WrongField

Schema = Mapping[str, Any]

ANY_OBJECT: Schema = {"type": "object"}
ANY_CALL = ""  # in place of the name of the tool that must be called


@dataclass(frozen=True)
class JsonAnswer:
    """The answer is JSON that a schema allows."""

    schema: Schema
    is_strict: bool = False  # else keywords that cannot be served are ignored


@dataclass(frozen=True)
class TextPattern:
    """The answer is a text that a regular expression matches, or a grammar in Lark."""

    kind: Literal["regex", "lark"]
    text: str


def chosen_tool(name: str, tools: Sequence[Tool]) -> str:
    """Return the tool that must be called, or ANY_CALL. Raises WrongField if there is none."""
    if not tools:
        raise WrongField("tool_choice asks for a call, but there are no tools; send some", "tool_choice")
    if name and name not in {tool.name for tool in tools}:
        raise WrongField(
            f"tool_choice names {shown(name)}, which is not among the tools; send one of them", "tool_choice"
        )
    return name


def strict_among(tools: Sequence[Tool], named: Iterable[Any]) -> frozenset[str]:
    """Return the names of those tools that are named as strict."""
    names = {tool.name for tool in tools}
    return frozenset(name for name in named if isinstance(name, str) and name in names)


@dataclass(frozen=True)
class Constraint:
    """Holds all that is demanded of one answer. Nothing: the model writes what it likes."""

    form: JsonAnswer | TextPattern | None = None
    must_call: str | None = None  # the name of a tool, or ANY_CALL
    strict_tools: frozenset[str] = frozenset()  # tools whose arguments must be what their schemas allow

    @property
    def is_empty(self) -> bool:
        return self.form is None and self.must_call is None and not self.strict_tools
