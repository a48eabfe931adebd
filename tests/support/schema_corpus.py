"""JSON schemas by the thousand: random ones of all features that strict schemas have, and those of clients.

All of their values are short, so that even a random model comes to the end of one.
"""

import re
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

Schema = dict[str, Any]

DEEPEST = 3
NAMES = (
    "name",
    "path",
    "old_string",
    "n",
    "$id",
    "a b",
    "größe",
    'q"q',
    "x-1",
    "items",
    "type",
    "\U0001f600",
)
CHOICES = ("red", "", "two words", "ü", 'a "b"', "\n", 0, 7, -1.5, True, False, None)
PATTERNS = ("^[a-c]{2,4}$", "^(yes|no)$", r"^\d{3}-[A-Z]$", "^x*y$", "ab")
FORMATS = {
    "date": r"\d{4}-\d{2}-\d{2}",
    "time": r"\d{2}:\d{2}:\d{2}(\.\d+)?([zZ]|[+-]\d{2}:\d{2})",
    "ipv4": r"(\d{1,3}\.){3}\d{1,3}",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}


def schemas(count: int, seed: int) -> Iterator[Schema]:
    """Yield those of clients, then random ones, each by its own seed."""
    yield from OF_CLIENTS[:count]
    for number in range(count - len(OF_CLIENTS)):
        random = Random(f"{seed} {number}")
        schema = _object(random, DEEPEST) if random.random() < 0.7 else _any(random, DEEPEST)
        yield _with_definitions(random, schema) if random.random() < 0.2 else schema


def _with_definitions(random: Random, schema: Schema) -> Schema:
    """Refer to shared schemas, one of which may hold itself."""
    end = {"value": _any(random, 1)}
    link = {"$ref": "#/$defs/link"}
    linked = _closed({**end, "next": {"anyOf": [{"type": "null"}, link]}}, ["value", "next"])
    shared = {"leaf": _any(random, 1), "link": random.choice((_closed(end, ["value"]), linked))}
    both = {"first": schema, "leaf": {"$ref": "#/$defs/leaf"}, "link": link}
    return _closed(both, ["first", "link"]) | {"$defs": shared}


def _closed(properties: Mapping[str, Schema], required: list[str]) -> Schema:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": required,
        "additionalProperties": False,
    }


def _any(random: Random, depth: int) -> Schema:
    plain = (
        _text,
        _integer,
        _number,
        _choice,
        _constant,
        lambda random: {"type": random.choice(["boolean", "null"])},
    )
    if depth and random.random() < 0.45:
        return random.choice((_object, _array, _tuple, _alternatives, _nullable))(random, depth - 1)
    schema = random.choice(plain)(random)
    return schema | {"description": "what it is", "title": "T"} if random.random() < 0.2 else schema


def _text(random: Random) -> Schema:
    kind = random.randrange(4)
    if kind == 0:
        return {"type": "string", "format": random.choice([*FORMATS])}
    if kind == 1:
        pattern = random.choice(PATTERNS)
        return {"type": "string", "pattern": pattern} | ({} if pattern.endswith("$") else {"maxLength": 6})
    least = random.randrange(3)
    return {"type": "string", "minLength": least, "maxLength": least + random.randrange(8)}


def _integer(random: Random) -> Schema:
    low = random.randrange(-1000, 1000)
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + random.randrange(1, 5000)}
    if random.random() < 0.2:
        return {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 50}
    return schema


def _number(random: Random) -> Schema:
    low = random.randrange(-100, 100) / 4
    return {"type": "number", "minimum": low, "maximum": low + random.randrange(1, 40) / 2}


def _choice(random: Random) -> Schema:
    return {"enum": random.sample(CHOICES, random.randrange(1, len(CHOICES)))}


def _constant(random: Random) -> Schema:
    return {"const": random.choice([*CHOICES, {"a": [1, "b"]}, [None, {}]])}


def _object(random: Random, depth: int) -> Schema:
    names = random.sample(NAMES, random.randrange(1, 5))
    required = [name for name in names if random.random() < 0.6]
    return _closed({name: _any(random, depth) for name in names}, required)


def _array(random: Random, depth: int) -> Schema:
    least = random.randrange(3)
    return {
        "type": "array",
        "items": _any(random, depth),
        "minItems": least,
        "maxItems": least + random.randrange(3),
    }


def _tuple(random: Random, depth: int) -> Schema:
    parts = [_any(random, depth) for _ in range(random.randrange(1, 4))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _alternatives(random: Random, depth: int) -> Schema:
    return {"anyOf": [_any(random, depth) for _ in range(random.randrange(2, 4))]}


def _nullable(random: Random, depth: int) -> Schema:
    return {"anyOf": [_any(random, depth), {"type": "null"}]}


TEXT: Schema = {"type": "string", "maxLength": 12}
# In the forms in which agents and SDKs send them.
OF_CLIENTS: tuple[Schema, ...] = (
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **_closed(
            {
                "command": TEXT,
                "timeout": {"type": "integer", "minimum": 0, "maximum": 600000},
                "description": TEXT,
                "run_in_background": {"type": "boolean"},
            },
            ["command"],
        ),
    },
    {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_closed(
            {
                "file_path": TEXT,
                "old_string": TEXT,
                "new_string": TEXT,
                "replace_all": {"type": "boolean", "default": False},
            },
            ["file_path", "old_string", "new_string"],
        ),
    },
    _closed(
        {
            "todos": {
                "type": "array",
                "maxItems": 3,
                "items": _closed(
                    {
                        "content": {"type": "string", "minLength": 1, "maxLength": 9},
                        "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                        "activeForm": TEXT,
                    },
                    ["content", "status", "activeForm"],
                ),
            }
        },
        ["todos"],
    ),
    _closed(
        {
            "command": {"type": "array", "items": TEXT, "maxItems": 4},
            "workdir": {"type": ["string", "null"], "maxLength": 8},
            "timeout_ms": {"type": ["integer", "null"], "minimum": 0, "maximum": 9999},
        },
        ["command", "workdir", "timeout_ms"],
    ),
    {
        "title": "Person",
        **_closed(
            {
                "name": {"title": "Name", **TEXT},
                "age": {
                    "anyOf": [{"type": "integer", "minimum": 0, "maximum": 120}, {"type": "null"}],
                    "default": None,
                    "title": "Age",
                },
            },
            ["name", "age"],
        ),
    },
    {
        "$defs": {"Step": _closed({"explanation": TEXT, "output": TEXT}, ["explanation", "output"])},
        **_closed(
            {
                "steps": {"type": "array", "items": {"$ref": "#/$defs/Step"}, "maxItems": 3},
                "final_answer": TEXT,
            },
            ["steps", "final_answer"],
        ),
    },
    _closed(
        {
            "todo": {"type": "string", "maxLength": 5},
            "plan": {
                "type": "array",
                "maxItems": 2,
                "items": _closed(
                    {
                        "step": TEXT,
                        "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                    },
                    ["step", "status"],
                ),
            },
        },
        ["todo", "plan"],
    ),
    _closed({}, []),
)


def is_valid(value: Any, schema: Any, root: Schema) -> bool:
    """Say whether a value is one of the schema; knows the keywords that are used above, and no others."""
    if isinstance(schema, bool):
        return schema
    return all(CHECKS[key](value, wanted, schema, root) for key, wanted in schema.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _has_type(value: Any, name: str) -> bool:
    match name:
        case "integer":
            return _is_number(value) and value == int(value)
        case "number":
            return _is_number(value)
        case "null":
            return value is None
    kinds = {"string": str, "boolean": bool, "object": dict, "array": list}
    return isinstance(value, kinds[name])


def _equal(one: Any, other: Any) -> bool:
    """As JSON: 1 is 1.0, and true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return one == other


def _reference(value: Any, where: str, _: Schema, root: Schema) -> bool:
    return is_valid(value, root["$defs"][where.rpartition("/")[2]], root)


def _properties(value: Any, wanted: Schema, schema: Schema, root: Schema) -> bool:
    return not isinstance(value, dict) or all(
        is_valid(value[name], each, root) for name, each in wanted.items() if name in value
    )


def _others(value: Any, wanted: Any, schema: Schema, root: Schema) -> bool:
    return not isinstance(value, dict) or all(
        is_valid(each, wanted, root)
        for name, each in value.items()
        if name not in schema.get("properties", {})
    )


def _items(value: Any, wanted: Any, schema: Schema, root: Schema) -> bool:
    first = len(schema.get("prefixItems", []))
    return not isinstance(value, list) or all(is_valid(each, wanted, root) for each in value[first:])


def _prefix(value: Any, wanted: list[Schema], schema: Schema, root: Schema) -> bool:
    return not isinstance(value, list) or all(
        is_valid(each, part, root) for each, part in zip(value, wanted, strict=False)
    )


def _of_texts(check: Any) -> Any:
    return lambda value, wanted, *_: not isinstance(value, str) or check(value, wanted)


def _of_numbers(check: Any) -> Any:
    return lambda value, wanted, *_: not _is_number(value) or check(value, wanted)


def _of_lists(check: Any) -> Any:
    return lambda value, wanted, *_: not isinstance(value, list) or check(value, wanted)


REMARKS = ("description", "title", "default", "$defs", "$schema")
CHECKS: dict[str, Any] = {
    **dict.fromkeys(REMARKS, lambda *_: True),
    "type": lambda value, wanted, *_: any(
        _has_type(value, each) for each in ([wanted] if isinstance(wanted, str) else wanted)
    ),
    "enum": lambda value, wanted, *_: any(_equal(value, each) for each in wanted),
    "const": lambda value, wanted, *_: _equal(value, wanted),
    "anyOf": lambda value, wanted, _, root: any(is_valid(value, each, root) for each in wanted),
    "$ref": _reference,
    "properties": _properties,
    "required": lambda value, wanted, *_: (
        not isinstance(value, dict) or all(name in value for name in wanted)
    ),
    "additionalProperties": _others,
    "items": _items,
    "prefixItems": _prefix,
    "minItems": _of_lists(lambda value, least: len(value) >= least),
    "maxItems": _of_lists(lambda value, most: len(value) <= most),
    "minLength": _of_texts(lambda value, least: len(value) >= least),
    "maxLength": _of_texts(lambda value, most: len(value) <= most),
    "pattern": _of_texts(lambda value, pattern: re.search(pattern, value) is not None),
    "format": _of_texts(lambda value, name: re.fullmatch(FORMATS[name], value) is not None),
    "minimum": _of_numbers(lambda value, least: value >= least),
    "maximum": _of_numbers(lambda value, most: value <= most),
    "exclusiveMinimum": _of_numbers(lambda value, bound: value > bound),
    "exclusiveMaximum": _of_numbers(lambda value, bound: value < bound),
}
