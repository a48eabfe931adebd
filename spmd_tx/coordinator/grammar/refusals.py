"""Says why a grammar cannot be used, in words of clients: what llguidance says has its own. Pure."""

import re
from collections.abc import Mapping
from typing import Any

from spmd_tx.coordinator.grammar.strict_schemas import BY_NAME, OF_VALUES
from spmd_tx.errors import InvalidRequest

MOST_OPTIONAL = 1000  # properties of one object. Each one may follow each of those before it
# Four for each property that may come next, and some more around them.
ROW_ITEMS = 4 * MOST_OPTIONAL + 96
MOST_SHOWN = 300  # characters of what llguidance says

# What is found in a message, and what is said for it; groups of the first are put into the second.
CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"Unimplemented keys: \[(.*?)\]",
        "a strict schema has the keywords {0}, which cannot be enforced; leave them out, or do not ask for "
        "strict: without it they are ignored",
    ),
    (
        "oneOf constraints are not supported",
        "a strict schema has a oneOf whose alternatives may be true at once, which cannot be enforced; write "
        "anyOf, or do not ask for strict",
    ),
    (r"Invalid type: (.*)", "the schema has the type {0}, which JSON does not have; send another one"),
    (
        r"Unsatisfiable schema: (.*)",
        "no value is valid by the schema of the answer ({0}); send one that some value can meet",
    ),
    (
        r"Resource '(.*?)' is not present",
        "a $ref of the schema names {0}, which is not in the schema; nothing is fetched; put it into $defs",
    ),
    (
        r"Pointer '(.*?)' does not exist",
        "a $ref of the schema names {0}, which is not in the schema; put it into $defs",
    ),
    (
        r"Failed to generate regex for (?:integer|float) range: (.*)",
        "the bounds of a number in the schema are too large, or leave no number ({0}); send other ones",
    ),
    ("circular references", "a $ref of the schema leads back to itself, and nothing can be its value"),
    (r"recursion limit exceeded", "the schema of the answer is nested too deeply; send a flatter one"),
    (
        "NoExtension",
        "the grammar of the answer comes to a place where no text can follow, such as a rule that only leads "
        "back to itself; send one that some text can meet",
    ),
    (
        r"look-?around",
        "the regular expression of the answer, or a pattern of its schema, looks ahead or behind, which is "
        "not served; write it without",
    ),
    ("backreferences", "the regular expression of the answer has backreferences, which are not served"),
    (r"unknown name: (.*)", "the grammar of the answer names {0}, which has no rule; add one"),
    (
        r"Current row has (\d+) items",
        "the grammar of the answer allows too many ways to go on at one place; send a simpler one, with "
        "fewer optional properties and alternatives",
    ),
    (
        r"too many (?:states|expressions)|fuel|schema too large|LexerTooComplex",
        "the grammar of the answer takes too much memory or time; send a simpler one, with shorter repeats",
    ),
    (
        r"regex parse error:[\s\S]*?error: (.*)",
        "a regular expression, or a pattern of a schema, cannot be read: {0}; send another one",
    ),
    (
        r"unknown special token: (.*?);",
        "the grammar of the answer names the special token {0}, which the model does not have",
    ),
    ("no start rule", "the grammar of the answer has no rule with the name start; add one"),
    (
        r"failed to compile JSON schema: (.*)",
        "the schema of the answer cannot be read: {0}; send another one",
    ),
)


def refusal(problem: str) -> str:
    """Return what is wrong with a grammar, from what llguidance says."""
    for cause, words in CAUSES:
        found = re.search(cause, problem)
        if found is not None:
            return words.format(*(_shown(each) for each in found.groups()))
    message, *_ = re.split(r"\n *\d+ \|", problem)  # without the lines of the grammar, which is ours in part
    return f"the grammar of the answer cannot be read: {_shown(message)}; send another one"


def _shown(text: str) -> str:
    return " ".join(text.split())[:MOST_SHOWN]


def check_optional(schema: Any) -> None:
    """Refuse a schema with an object of too many optional properties. Raises InvalidRequest."""
    if isinstance(schema, list):
        for each in schema:
            check_optional(each)
    if not isinstance(schema, Mapping):
        return
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, Mapping):
        needed = {each for each in required if isinstance(each, str)} if isinstance(required, list) else set()
        optional = len(properties.keys() - needed)
        if optional > MOST_OPTIONAL:
            raise InvalidRequest(
                f"an object of the schema has {optional} optional properties; at most {MOST_OPTIONAL} can be "
                "served: require some, or put some into an object of their own"
            )
    for key, content in schema.items():
        if key in BY_NAME and isinstance(content, Mapping):
            check_optional(list(content.values()))
        elif key not in OF_VALUES:
            check_optional(content)
