"""Reads what requests of all dialects have in common: texts, and descriptions of functions. Pure."""

from collections.abc import Iterable

from spmd_tx.coordinator.conversation.messages import Fields, shown
from spmd_tx.coordinator.conversation.tools import Tool
from spmd_tx.errors import WrongField


def text_of(place: str, fields: Fields, key: str) -> str:
    """Return the text of a field. Raises WrongField."""
    value = fields.get(key)
    if not isinstance(value, str):
        raise WrongField(f"{place}.{key} is {shown(value)}; send a text", f"{place}.{key}")
    return value


def refuse(place: str, unknown: Iterable[str]) -> None:
    """Raise WrongField for the first of some fields, if there are any."""
    for name in unknown:
        raise WrongField(f"{place}.{name} is not known to this server; leave it out", f"{place}.{name}")


def function_of(place: str, fields: Fields, schema_key: str = "parameters", param: str | None = None) -> Tool:
    """Read a function. ``param`` is what errors name; None: ``place`` itself, or its schema."""
    name, description = fields.get("name"), fields.get("description") or ""
    schema = fields.get(schema_key) or {"type": "object", "properties": {}}
    if not (isinstance(name, str) and name and isinstance(description, str)):
        raise WrongField(
            f"{place} has the name {shown(name)} and the description {shown(description)}; send texts",
            param or place,
        )
    if not isinstance(schema, dict):
        wrong = f"{place}.{schema_key}"
        raise WrongField(f"{wrong} is {shown(schema)}; send a JSON schema", param or wrong)
    return Tool(name, description, schema)
