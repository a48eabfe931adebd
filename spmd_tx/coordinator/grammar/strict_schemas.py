"""Leaves out of a strict schema what excludes no value; a grammar refuses what it cannot enforce. Pure."""

from collections.abc import Mapping
from typing import Any

# Formats of texts that llguidance enforces. To JSON Schema, all others are remarks.
FORMATS = frozenset("date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split())
OF_VALUES = frozenset({"const", "enum", "default", "examples"})  # keywords whose contents are no schemas
BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})  # of schemas, by any names


def enforceable(schema: Any) -> Any:
    """Return a schema, or what stands in one, with the same meaning."""
    if isinstance(schema, list):
        return [enforceable(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {key: _content(key, each) for key, each in schema.items() if not _is_remark(key, each)}


def _content(key: str, content: Any) -> Any:
    if key in OF_VALUES:
        return content
    if key in BY_NAME and isinstance(content, Mapping):
        return {name: enforceable(each) for name, each in content.items()}
    return enforceable(content)


def _is_remark(key: str, content: Any) -> bool:
    if key == "format":
        return isinstance(content, str) and content not in FORMATS
    return key == "uniqueItems" and content is False
