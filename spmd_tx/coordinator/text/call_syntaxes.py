"""How families of models write tool calls: the markers around a call, and how its inside is read. Pure.

Readers raise ValueError or RecursionError at a call that is none. No pattern goes back over blanks, which a
model may write by the thousand.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from spmd_tx.coordinator.text.argument_values import json_value
from spmd_tx.coordinator.text.reply_events import BLANKS, ReplyCall

Schemas = Mapping[str, Mapping[str, Any]]  # of the arguments, by the names of tools

NO_ARGUMENTS = "{}"
_NAME = re.compile(r"[^\s<>{}\"]{1,256}")


@dataclass(frozen=True)
class CallSyntax:
    """Says where a call begins and ends, and reads what is between."""

    opener: str
    closer: str | None  # None: it ends where the next one begins, or with the answer
    read: Callable[[str, Schemas], Sequence[ReplyCall]]
    around: tuple[str, ...] = ()  # markers before and behind all calls, which say nothing


_ABSENT = msgspec.Raw(b"null")


class _JsonCall(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: msgspec.Raw = _ABSENT
    parameters: msgspec.Raw = _ABSENT
    id: msgspec.Raw = _ABSENT
    type: msgspec.Raw = _ABSENT


def call_name(text: str) -> str:
    """Return the name of a tool. Raises ValueError if it cannot be one."""
    name = text.strip(BLANKS)
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name[:40]!r} is no name of a tool")
    return name


def json_arguments(text: str | bytes) -> str:
    """Return a JSON object without blanks, else as it was written. Raises ValueError."""
    value = msgspec.json.decode(text)
    if isinstance(value, str):  # some models quote the object
        text, value = value, msgspec.json.decode(value)
    if value is None:
        return NO_ARGUMENTS
    if not isinstance(value, dict):
        raise ValueError("arguments are no JSON object")
    compact = msgspec.json.format(text, indent=-1)
    return compact if isinstance(compact, str) else compact.decode()


def json_call(text: str | bytes, *, needs_arguments: bool = False) -> ReplyCall:
    """Read ``{"name", "arguments"}``, or ``parameters`` in its place. Raises ValueError."""
    read = msgspec.json.decode(text, type=_JsonCall)
    arguments = read.arguments if read.arguments is not _ABSENT else read.parameters
    if needs_arguments and arguments is _ABSENT:
        raise ValueError("a call without arguments")
    return ReplyCall(call_name(read.name), json_arguments(bytes(arguments)))


def _read_json(inside: str, schemas: Schemas) -> Sequence[ReplyCall]:
    return [json_call(inside)]


_PARAMETER = re.compile(r"[ \t\r\n]*+<parameter=([^<>\n]{1,256})>\n?")
_PARAMETER_END = re.compile(r"\n?</parameter>[ \t\r\n]{0,4}(?=<parameter=|</function>)")


def _read_parameters(inside: str, schemas: Schemas) -> Sequence[ReplyCall]:
    r"""Read ``<function=N>\n<parameter=K>\nV\n</parameter>\n</function>``.

    A value loses one newline on each side, and keeps its own. It may quote the markers.
    """
    text = inside.strip(BLANKS)
    head, _, rest = text.removeprefix("<function=").partition(">")
    if not text.startswith("<function="):
        raise ValueError("a call without its function")
    name = call_name(head)
    values, at = _read_values(text, len(text) - len(rest), _PARAMETER, _PARAMETER_END)
    if text[at:].lstrip(BLANKS) != "</function>":
        raise ValueError("a function without its end")
    return [ReplyCall(name, _written_arguments(values, schemas.get(name, {})))]


_KEY = re.compile(r"<arg_key>((?:(?!</arg_key>).)*+)</arg_key>[ \t\r\n]*+<arg_value>", re.DOTALL)
_VALUE_END = re.compile(r"</arg_value>[ \t\r\n]{0,4}(?=<arg_key>|\Z)")


def _read_keys(inside: str, schemas: Schemas) -> Sequence[ReplyCall]:
    """Read ``N<arg_key>K</arg_key><arg_value>V</arg_value>``. A value is all that its markers enclose."""
    text = inside.strip(BLANKS)
    head, _, _ = text.partition("<arg_key>")
    name = call_name(head)
    values, at = _read_values(text, len(head), _KEY, _VALUE_END)
    if at < len(text):
        raise ValueError("text between the arguments")
    return [ReplyCall(name, _written_arguments(values, schemas.get(name, {})))]


def _written_arguments(values: Mapping[str, str], schema: Mapping[str, Any]) -> str:
    properties = schema.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    written = (
        f"{msgspec.json.encode(key).decode()}:{json_value(value, known.get(key), schema)}"
        for key, value in values.items()
    )
    return f"{{{','.join(written)}}}"


def _read_values(
    text: str, at: int, begin: re.Pattern[str], end: re.Pattern[str]
) -> tuple[dict[str, str], int]:
    """Read the values that patterns enclose, by their names, and return where they end."""
    values = dict[str, str]()
    while opener := begin.match(text, at):
        closer = end.search(text, opener.end())
        if closer is None:
            raise ValueError("a value without its end")
        values[opener[1].strip(BLANKS)] = text[opener.end() : closer.start()]
        at = closer.end()
    return values, at


DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"


def _read_deepseek(inside: str, schemas: Schemas) -> Sequence[ReplyCall]:
    r"""Read ``N<｜tool▁sep｜>{…}``, and the older ``function<｜tool▁sep｜>N\n```json\n{…}\n`````."""
    head, separator, rest = inside.partition(DEEPSEEK_SEPARATOR)
    if not separator:
        raise ValueError("a call without its separator")
    name, fence, fenced = rest.partition(FENCE + "json")
    if fence and head.strip(BLANKS) == "function":
        head, rest = name, fenced.rstrip(BLANKS).removesuffix(FENCE)
    return [ReplyCall(call_name(head), json_arguments(rest))]


def _read_kimi(inside: str, schemas: Schemas) -> Sequence[ReplyCall]:
    """Read ``functions.N:I<|tool_call_argument_begin|>{…}``; N alone is a name, too."""
    head, separator, arguments = inside.partition("<|tool_call_argument_begin|>")
    if not separator:
        raise ValueError("a call without its separator")
    head, colon, number = head.strip(BLANKS).removeprefix("functions.").rpartition(":")
    name = head if colon and number.isdecimal() else head + colon + number
    return [ReplyCall(call_name(name), json_arguments(arguments))]


def _read_mistral(inside: str, schemas: Schemas) -> Sequence[ReplyCall]:
    """Read a JSON list of calls (to v7), or ``N[ARGS]{…}`` (from v11 on), perhaps with an id before it."""
    if not inside.lstrip(BLANKS).startswith(("[", "{")):
        head, separator, arguments = inside.partition("[ARGS]")
        if not separator:
            raise ValueError("a call without its separator")
        return [ReplyCall(call_name(head.partition("[CALL_ID]")[0]), json_arguments(arguments))]
    calls = msgspec.json.decode(inside, type=list[msgspec.Raw] | _JsonCall)
    if isinstance(calls, _JsonCall):
        return [json_call(inside)]
    if not calls:
        raise ValueError("a list without calls")
    return [json_call(bytes(call)) for call in calls]


HERMES = CallSyntax("<tool_call>", "</tool_call>", _read_json)
QWEN_XML = CallSyntax("<tool_call>", "</tool_call>", _read_parameters)
GLM = CallSyntax("<tool_call>", "</tool_call>", _read_keys)
MISTRAL = CallSyntax("[TOOL_CALLS]", None, _read_mistral)
DEEPSEEK = CallSyntax(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    _read_deepseek,
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
KIMI = CallSyntax(
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    _read_kimi,
    ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
