"""Turns the value of an argument that a model wrote as plain text into JSON, by the tool's schema. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

UNIONS = ("anyOf", "oneOf", "allOf")
JSON_TYPES = {
    type(None): ("null",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    str: ("string",),
    list: ("array",),
    dict: ("object",),
}
SPELLINGS = {"True": "true", "False": "false", "None": "null"}  # which templates write, and so models do


def json_value(text: str, schema: object, root: Mapping[str, Any]) -> str:
    """Return a value as JSON. It stays text where the schema wants text, or nothing that the text could be.

    ``root`` is the schema that has the definitions to which ``schema`` refers.
    """
    written = SPELLINGS.get(text.strip(), text)
    try:
        types = frozenset(_types(schema, root, set()))
        wanted = types & {"null"} if "string" in types else types
        if wanted and _is_of(msgspec.json.decode(written), wanted):
            return msgspec.json.format(written, indent=-1)
    except (ValueError, RecursionError):
        pass
    return msgspec.json.encode(text).decode()


def _is_of(value: object, types: frozenset[str]) -> bool:
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return True
    return not types.isdisjoint(JSON_TYPES[type(value)])


def _types(schema: object, root: Mapping[str, Any], seen: set[int]) -> Iterator[str]:
    """Yield the names of the types that a schema allows. Each part of it is read once."""
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return
    seen.add(id(schema))
    named = schema.get("type")
    yield from (each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str))
    listed = schema.get("enum")
    values = [*listed] if isinstance(listed, list) else []
    for value in [*values, *([schema["const"]] if "const" in schema else [])]:
        yield from JSON_TYPES[type(value)]
    if schema.get("nullable") is True:
        yield "null"
    for union in UNIONS:
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            yield from _types(choice, root, seen)
    if isinstance(reference := schema.get("$ref"), str):
        yield from _types(_definition(reference, root), root, seen)


def _definition(reference: str, root: object) -> object:
    """Return the part of the schema to which a reference points; None if there is no such part."""
    start, *path = reference.split("/")
    found = root if start == "#" else None
    for key in path:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
