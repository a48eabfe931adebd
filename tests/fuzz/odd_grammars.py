"""Odd demands on the form of an answer: schemas and patterns that cost much, or mean nothing."""

from collections.abc import Callable
from typing import Any

from tests.fuzz.oddities import Oddities

Body = dict[str, Any]
PERSON = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"enum": ["x", "\N{GRINNING FACE}"]}},
    "required": ["a"],
    "additionalProperties": False,
}


def _nested(depth: int) -> Body:
    schema: Body = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def optional(count: int) -> Body:
    """Schema that takes time by the square of its size."""
    return {"type": "object", "properties": {f"p{number}": {} for number in range(count)}}


def chained(length: int) -> Body:
    """Schema whose references overflow the compiler's stack."""
    links: Body = {f"d{place}": {"anyOf": [{"$ref": f"#/$defs/d{place + 1}"}]} for place in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{length}": {"type": "null"}}}


def of_patterns(count: int) -> Body:
    """Schema of a text that must match all of them, which takes the compiler minutes."""
    return {"type": "string", "allOf": [{"pattern": f".*a{{{each}}}.*b"} for each in range(1, count)]}


SCHEMAS: tuple[Callable[[], Any], ...] = (
    lambda: {},
    lambda: {"type": "nothing"},
    lambda: {"not": {}},
    lambda: {"enum": []},
    lambda: {"const": "\0"},
    lambda: {"type": ["string", "null", "integer"]},
    lambda: {"$ref": "#"},
    lambda: {"$ref": "http://127.0.0.1:1/"},
    lambda: {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}, "$ref": "#/$defs/a"},
    lambda: {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    lambda: {"allOf": [{"type": "integer"}, {"type": "string"}]},
    lambda: {"oneOf": [{"minimum": 5}, {"maximum": 9}]},
    lambda: {"type": "string", "minLength": 10**9, "maxLength": 5},
    lambda: {"type": "string", "pattern": "(a|aa)+$", "format": "uuid"},
    lambda: {"type": "array", "minItems": 10**6, "items": {"type": "null"}},
    lambda: {"type": "array", "uniqueItems": True, "prefixItems": [{"type": "integer"}] * 50},
    lambda: {"type": "integer", "minimum": -(10**30), "maximum": 10**30, "multipleOf": 7},
    lambda: {"type": "number", "exclusiveMinimum": 1e308},
    lambda: {"enum": [f"value {number}" for number in range(5000)]},
    lambda: {"type": "object", "patternProperties": {"^(a+)+$": {}}, "propertyNames": {"pattern": "^a"}},
    lambda: {"type": "object", "x-guidance": {"lenient": True, "whitespace_pattern": "a*"}},
    lambda: optional(300),
    lambda: optional(3000),
    lambda: _nested(60),
    lambda: _nested(900),
    lambda: chained(3000),
    lambda: of_patterns(60),
)
WITHIN_EACH_OTHER = "\n".join(
    ["start: r0", *(f'r{place}: "a" r{place + 1}?' for place in range(8000)), 'r8000: "b"']
)
REGEXES = (
    "[ab]{1,3}",
    "",
    "(",
    "a{0,100000}",
    "((a{1,50}){1,50}){1,50}",
    "(a*)*(b|[^b])*c{5}",
    "(?=a)b",
    r"\p{L}+",
    r"\ud800",
    "[^\\s\\S]",
    "a/b\nc",
    "\0",
    "(x+x+)+y",
    "." * 3000,
    "|".join(f"word{number}" for number in range(3000)),
)
GRAMMARS = (
    'start: "a" /[b-d]+/',
    "start: start",
    WITHIN_EACH_OTHER,
    'start: start "a" | "a"',
    "start: other",
    'start: ""',
    "",
    "start: %json {",
    'start: %json {"type": "object"}',
    "start: %regex { }",
    "%import common.WORD\nstart: WORD",
    'start: "a" }\n%lark { start: "b"',
    'start: ("a" | "b"){1,1000000}',
    "start: <[5]> <[99999999]>",
    "start: <think>",
    "start: @nothing",
    'start[capture="a", max_tokens=99999999999]: /.*/',
    'start: /(.|\\n)*/ "' + "long " * 200 + '"',
    "\n".join(
        [*(f"r{number}: r{number + 1} r{number + 1}" for number in range(40)), 'r40: "a"', "start: r0"]
    ),
)


def schema(odd: Oddities) -> Any:
    """One that is in order half of the time, as it is or with something odd in it."""
    chosen = PERSON if odd.chance(0.5) else odd.random.choice(SCHEMAS)()
    is_small = len(chosen) > 1 and len(str(chosen)) < 2000
    return odd.spoilt(chosen) if is_small and odd.chance(0.3) else chosen


def pattern(odd: Oddities) -> Body:
    """A regular expression or a grammar, as completions and chats take it."""
    if odd.chance(0.5):
        return {"regex": odd.text() if odd.chance(0.1) else odd.random.choice(REGEXES)}
    return {"grammar": odd.text() if odd.chance(0.1) else odd.random.choice(GRAMMARS)}


def of_chat(odd: Oddities) -> Body:
    if odd.chance(0.3):
        return pattern(odd)
    if odd.chance(0.1):
        return {"response_format": {"type": "json_object"}}
    form = {"name": "a", "schema": schema(odd), "strict": odd.chance(0.5)}
    return {"response_format": {"type": "json_schema", "json_schema": form}}


def of_response(odd: Oddities) -> Body:
    form = {"type": "json_schema", "name": "a", "schema": schema(odd), "strict": odd.chance(0.5)}
    return {"text": {"format": form}}


def of_message(odd: Oddities) -> Body:
    return {"output_config": {"format": {"type": "json_schema", "schema": schema(odd)}}}
