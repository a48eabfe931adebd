"""Finds fields of requests that this server does not know and that ask for something. Pure.

A misspelled or newer field changes nothing here, so a request with one is refused by its name. A field that
is null, false, zero or empty asks for nothing: newer SDKs send the defaults of all their fields.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from msgspec import inspect

from spmd_tx.errors import InvalidRequest

TAG = "type"  # clients say with it what the route says already
MOST_SHOWN = 80  # characters of a name

_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})


def check_json(body: object, schema: type[msgspec.Struct]) -> None:
    """Check a decoded JSON body. Raises InvalidRequest, which names the field and those that are known."""
    for place, known in _unknown(body, _described(schema), ""):
        raise InvalidRequest(f"{place} is not known to this server; leave it out. Known: {', '.join(known)}")


def number_in(message: Message) -> int | None:
    """Return the number of a field that a protobuf message has and its type lacks; None: there is none.

    A protobuf message leaves out fields that ask for nothing. Messages within it are not looked at.
    """
    return next((field.field_number for field in UnknownFieldSet(message)), None)


@cache
def _described(schema: type[msgspec.Struct]) -> inspect.Type:
    return inspect.type_info(schema)


def _unknown(value: object, kind: inspect.Type, place: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the path of each unknown field, with the names that are known there."""
    if isinstance(value, list) and isinstance(kind, inspect.ListType):
        if _has_structs(kind.item_type):
            for index, each in enumerate(value):
                yield from _unknown(each, kind.item_type, f"{place}[{index}]")
    elif isinstance(value, list) and isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from _unknown(value, each, place)
    elif isinstance(value, dict):
        struct = _struct_of(kind, value)
        if struct is not None:
            yield from _unknown_of(value, struct, place)


def _unknown_of(
    value: Mapping[str, Any], struct: inspect.StructType, place: str
) -> Iterator[tuple[str, list[str]]]:
    known = {field.encode_name: field.type for field in struct.fields}
    within = f"{place}." if place else ""
    for name, inner in value.items():
        if name in known:
            yield from _unknown(inner, known[name], f"{within}{name}")
        elif name not in (TAG, struct.tag_field) and inner not in _NOTHING:
            yield f"{within}{name[:MOST_SHOWN]}", sorted(known)


def _struct_of(kind: inspect.Type, value: Mapping[str, Any]) -> inspect.StructType | None:
    """The struct that a JSON object stands for; None: an object of any names, or one that is refused."""
    if isinstance(kind, inspect.StructType):
        return kind
    if isinstance(kind, inspect.UnionType):
        structs = [each for each in kind.types if isinstance(each, inspect.StructType)]
        for struct in structs:
            if len(structs) == 1 or value.get(struct.tag_field or TAG) == struct.tag:
                return struct
    return None


def _has_structs(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.UnionType):
        return any(map(_has_structs, kind.types))
    return isinstance(kind, inspect.StructType)
