"""How each family's tool calls are written, as rules of a grammar; text/call_syntaxes.py reads them. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from llguidance import regex_to_lark

from spmd_tx.coordinator.conversation.messages import Tool
from spmd_tx.coordinator.grammar.constraints import ANY_OBJECT, Schema
from spmd_tx.coordinator.grammar.strict_schemas import enforceable
from spmd_tx.coordinator.text import call_syntaxes
from spmd_tx.coordinator.text.call_syntaxes import CallSyntax
from spmd_tx.coordinator.text.reply_formats import BareCalls

# A model that likes blanks would fill an answer with free ones. This is what JSON libraries write.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
ARGS, SEPARATOR = "[ARGS]", "<｜tool▁sep｜>"


@dataclass
class Rules:
    """Collects the rules of one grammar."""

    special_tokens: Mapping[str, int]  # by their texts; no free text contains them
    lines: list[str] = field(default_factory=list)

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule, and return its name."""
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Add a terminal, and return its name."""
        name = f"T{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def marker(self, text: str) -> str:
        """Return the token of a marker, or its text if it is not a special one."""
        token = self.special_tokens.get(text)
        return literal(text) if token is None else f"<[{token}]>"

    def text_until(self, marker: str) -> str:
        """Return any text that ends with a marker, which it contains once."""
        if marker in self.special_tokens:
            return self.rule(rf"/(.|\n)*/ {self.marker(marker)}")
        return self.rule(rf"/(.|\n)*{escaped(marker)}/", "[lazy]")

    def value_text(self, schema: Schema, marker: str) -> str:
        """Return a text that a schema allows, without quotes, and the marker behind it."""
        least, most = schema.get("minLength"), schema.get("maxLength")
        low, high = least if isinstance(least, int) else 0, most if isinstance(most, int) else ""
        text = rf"(.|\n){{{low},{high}}}" if low or high != "" else r"(.|\n)*"
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            text = matching(pattern)
        if marker in self.special_tokens:
            return self.rule(f"/{text}/ {self.marker(marker)}")
        return self.rule(f"/{text}{escaped(marker)}/", "[lazy]")

    def text_without(self, marker: str) -> str:
        """Return any text without a marker."""
        if marker in self.special_tokens:
            return self.terminal(r"/(.|\n)+/")
        return self.terminal(rf"/(.|\n)+/ & ~/(.|\n)*{escaped(marker)}(.|\n)*/")

    def json(self, schema: Schema, *, is_strict: bool) -> str:
        """Return the JSON that a schema allows."""
        wanted = enforceable(schema) if is_strict else schema
        guided = {**wanted, "x-guidance": {**COMPACT, "lenient": not is_strict}}
        return self.rule(f"%json {json.dumps(guided)}")


def literal(text: str) -> str:
    """Return a text as a grammar has it."""
    return json.dumps(text)


def escaped(text: str) -> str:
    """Return a text as a regular expression of a grammar has it."""
    return re.sub(r"([\\.+*?()|\[\]{}^$/])", r"\\\1", text).replace("\n", r"\n")


def matching(pattern: str) -> str:
    """Return the texts in which a pattern is found, which may say where they begin and end."""
    inside = pattern.removeprefix("^").removesuffix("$")
    before = "" if pattern.startswith("^") else r"(.|\n)*"
    behind = "" if pattern.endswith("$") else r"(.|\n)*"
    return f"{before}({regex_to_lark(inside)}){behind}".replace("\n", r"\n")


def calls_of(
    syntax: CallSyntax | BareCalls, tools: Sequence[tuple[Tool, bool]], rules: Rules, *, are_parallel: bool
) -> str:
    """Return one or more calls of tools, each of which is strict or not."""
    call = rules.rule(" | ".join(_call(syntax, tool, is_strict, rules) for tool, is_strict in tools))
    before, between, behind = _around(syntax, rules)
    several = f"{call} ({between} {call})*" if are_parallel else call
    return rules.rule(f"{before} {several} {behind}")


def _around(syntax: CallSyntax | BareCalls, rules: Rules) -> tuple[str, str, str]:
    """Return what stands before, between and behind calls."""
    if isinstance(syntax, BareCalls):
        return "", literal("; "), ""
    if syntax is call_syntaxes.MISTRAL and ARGS not in rules.special_tokens:
        return f"{rules.marker(syntax.opener)} {literal('[')}", literal(", "), literal("]")
    if syntax.around:
        before, behind = map(rules.marker, syntax.around)
        return before, "", behind
    return "", "" if syntax is call_syntaxes.MISTRAL else literal("\n"), ""


def _call(syntax: CallSyntax | BareCalls, tool: Tool, is_strict: bool, rules: Rules) -> str:
    if syntax is call_syntaxes.QWEN_XML:
        return _parameters(tool, is_strict, rules)
    if syntax is call_syntaxes.GLM:
        return _keys(tool, is_strict, rules)
    arguments = rules.json(tool.parameters or ANY_OBJECT, is_strict=is_strict)
    if isinstance(syntax, BareCalls):
        return rules.rule(_object(tool.name, "parameters", arguments))
    opener, closer = rules.marker(syntax.opener), rules.marker(syntax.closer) if syntax.closer else ""
    if syntax is call_syntaxes.MISTRAL:
        if ARGS not in rules.special_tokens:
            return rules.rule(_object(tool.name, "arguments", arguments))
        return rules.rule(f"{opener} {literal(tool.name)} {rules.marker(ARGS)} {arguments}")
    if syntax is call_syntaxes.DEEPSEEK:
        head = f"{literal(tool.name)} {rules.marker(SEPARATOR)}"
        return rules.rule(f"{opener} {head} {arguments} {closer}")
    if syntax is call_syntaxes.KIMI:
        head = f"{literal(f'functions.{tool.name}:')} /[0-9]{{1,4}}/"
        head += f" {rules.marker('<|tool_call_argument_begin|>')}"
        return rules.rule(f"{opener} {head} {arguments} {closer}")
    inside = _object(tool.name, "arguments", arguments)
    return rules.rule(f"{opener} {literal(chr(10))} {inside} {literal(chr(10))} {closer}")


def _object(name: str, key: str, arguments: str) -> str:
    head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": '
    return f"{literal(head)} {arguments} {literal('}')}"


def _parameters(tool: Tool, is_strict: bool, rules: Rules) -> str:
    syntax, end = call_syntaxes.QWEN_XML, "\n</parameter>\n"
    parts = [rules.marker(syntax.opener), literal(f"\n<function={tool.name}>\n")]
    for key, schema, is_required in _properties(tool):
        value = _value(schema, end, is_strict, rules)
        part = f"{literal(f'<parameter={key}>{chr(10)}')} {value}"
        parts.append(part if is_required else f"({part})?")
    return rules.rule(" ".join([*parts, literal("</function>\n"), rules.marker(syntax.closer or "")]))


def _keys(tool: Tool, is_strict: bool, rules: Rules) -> str:
    syntax, line = call_syntaxes.GLM, f"{literal(chr(10))}?"
    parts = [rules.marker(syntax.opener), literal(tool.name), line]
    for key, schema, is_required in _properties(tool):
        head = f"{rules.marker('<arg_key>')} {literal(key)} {rules.marker('</arg_key>')} {line}"
        value = _value(schema, "</arg_value>", is_strict, rules)
        part = f"{head} {rules.marker('<arg_value>')} {value} {line}"
        parts.append(part if is_required else f"({part})?")
    return rules.rule(" ".join([*parts, rules.marker(syntax.closer or "")]))


def _value(schema: Any, end: str, is_strict: bool, rules: Rules) -> str:
    """Return a value and the marker behind it; texts are written without quotes."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    choices = schema.get("enum") if isinstance(schema, Mapping) else None
    if isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices):
        return f"({' | '.join(map(literal, choices))}) {rules.marker(end)}"
    if kind == "string" and isinstance(schema, Mapping):
        return rules.value_text(schema, end)
    of_any = schema if isinstance(schema, Mapping) else {}
    return f"{rules.json(of_any, is_strict=is_strict)} {rules.marker(end)}"


def _properties(tool: Tool) -> list[tuple[str, Any, bool]]:
    """Return the name and the schema of each argument, and whether it is required."""
    properties, required = tool.parameters.get("properties"), tool.parameters.get("required")
    if not isinstance(properties, Mapping):
        return []
    needed = required if isinstance(required, list) else []
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    return [
        (key, {**shared, **schema} if isinstance(schema, Mapping) else schema, key in needed)
        for key, schema in properties.items()
    ]
