"""Reads the tools of OpenAI's Responses, some of which stand in namespaces. Pure; raises InvalidRequest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spmd_tx.coordinator.conversation.messages import Fields, Tool
from spmd_tx.coordinator.conversation.reading import function_of
from spmd_tx.errors import WrongField

FUNCTION, NAMESPACE = "function", "namespace"
BETWEEN = "__"  # a namespace and a name, in the name that the model reads


@dataclass(frozen=True)
class OfferedTools:
    """Holds the functions of a request, by the names that the model reads."""

    tools: tuple[Tool, ...] = ()
    places: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # namespace and name, of those in one

    @staticmethod
    def joined(space: str, name: str) -> str:
        """Return the name that the model reads."""
        return f"{space}{'' if space.endswith(BETWEEN) else BETWEEN}{name}"


def read_tools(tools: Sequence[Fields]) -> OfferedTools:
    """Read the functions of a list ``tools``. Others are run by OpenAI's servers, or have no schema."""
    found, places = list[Tool](), dict[str, tuple[str, str]]()
    for number, fields in enumerate(tools):
        place = f"tools[{number}]"
        if fields.get("type") == FUNCTION:
            found.append(function_of(place, fields))
        elif fields.get("type") == NAMESPACE:
            space, inner = fields.get("name"), fields.get("tools")
            if not isinstance(space, str) or not isinstance(inner, list):
                raise WrongField(f"{place} is a namespace without a name and a list of tools", place)
            for at, each in enumerate(inner):
                if not isinstance(each, dict) or each.get("type", FUNCTION) != FUNCTION:
                    continue
                tool = function_of(f"{place}.tools[{at}]", each)
                name = OfferedTools.joined(space, tool.name)
                places[name] = space, tool.name
                found.append(Tool(name, tool.description, tool.parameters))
    return OfferedTools(tuple(found), places)
