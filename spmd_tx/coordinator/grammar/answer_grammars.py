"""Writes what is demanded of an answer as one grammar of the whole answer, reasoning included. Pure.

A grammar that began behind the reasoning would fail at the border: a token may have text on both sides of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from llguidance import regex_to_lark

from spmd_tx.coordinator.conversation.messages import Conversation, Tool
from spmd_tx.coordinator.grammar.call_grammars import Rules, calls_of, literal
from spmd_tx.coordinator.grammar.constraints import Constraint, JsonAnswer, TextPattern
from spmd_tx.coordinator.grammar.refusals import check_optional
from spmd_tx.coordinator.text.channel_replies import CHANNEL, END, FUNCTIONS, MESSAGE, START
from spmd_tx.coordinator.text.markers import tail
from spmd_tx.coordinator.text.reply_events import BLANKS
from spmd_tx.coordinator.text.reply_formats import BareCalls, Channels, ReplyFormat

CONSTRAIN = "<|constrain|>"
ANY_TEXT = r"/(.|\n)*/"
SHORT_BLANKS = r"/[ \n]{1,4}/?"


@dataclass(frozen=True)
class AnswerStart:
    """Holds what the grammar of an answer depends on, besides the constraint."""

    format: ReplyFormat | None  # how the model writes reasoning and calls; None: as text
    prompt: str  # its end, which may have begun the reasoning
    special_tokens: Mapping[str, int]  # of the vocabulary, by their texts


def answer_grammar(constraint: Constraint, conversation: Conversation, start: AnswerStart) -> str | None:
    """Return the grammar of an answer in Lark, as llguidance reads it; None: the answer is free.

    Raises InvalidRequest for a schema that cannot be served.
    """
    if constraint.is_empty:
        return None
    schemas = [tool.parameters for tool, _ in _tools(constraint, conversation)]
    check_optional([*schemas, constraint.form.schema] if isinstance(constraint.form, JsonAnswer) else schemas)
    rules, format = Rules(start.special_tokens), start.format
    if format is not None and isinstance(format.calls, Channels):
        body = _in_channels(constraint, conversation, rules)
    else:
        # Bare calls are read where an answer begins, and nowhere else.
        is_bare = format is not None and isinstance(format.calls, BareCalls) and conversation.tools
        before = "" if is_bare else _reasoning(start, rules)
        body = f"{before} ({_body(constraint, conversation, format, rules)})"
    return "\n".join([f"start: {body}", *rules.lines, ""])


def pattern_grammar(pattern: TextPattern) -> str:
    """Return the grammar of a text without any format."""
    rules = Rules({})
    return "\n".join([f"start: {_form(pattern, rules)}", *rules.lines, ""])


def _reasoning(start: AnswerStart, rules: Rules) -> str:
    """Return the reasoning that may come first, or its rest if the prompt has begun it."""
    if start.format is None or start.format.reasoning is None:
        return ""
    opener, closer = start.format.reasoning
    begun = tail(start.prompt, BLANKS)
    if begun.endswith(closer):
        return SHORT_BLANKS
    rest = f"{rules.text_until(closer)} {SHORT_BLANKS}"
    return rest if begun.endswith(opener) else f"({rules.marker(opener)} {rest})?"


def _body(
    constraint: Constraint, conversation: Conversation, format: ReplyFormat | None, rules: Rules
) -> str:
    syntax = None if format is None or isinstance(format.calls, Channels) else format.calls
    tools = _tools(constraint, conversation)
    if syntax is None or not tools:
        return _form(constraint.form, rules)
    calls = calls_of(syntax, tools, rules, are_parallel=conversation.has_parallel_calls)
    if constraint.must_call is not None:
        return calls
    if constraint.form is not None:
        return f"{_form(constraint.form, rules)} | {calls}"
    if isinstance(syntax, BareCalls):
        other = rules.terminal(r"/[^{](.|\n)*/")
        return f"({other})? | {calls}"
    return f"({rules.text_without((*syntax.around, syntax.opener)[0])})? ({calls})?"


def _tools(constraint: Constraint, conversation: Conversation) -> list[tuple[Tool, bool]]:
    """Return the tools that may be called, and whether each is strict."""
    name = constraint.must_call
    return [
        (tool, tool.name in constraint.strict_tools)
        for tool in conversation.tools
        if not name or tool.name == name
    ]


def _form(form: JsonAnswer | TextPattern | None, rules: Rules) -> str:
    match form:
        case None:
            return ANY_TEXT
        case JsonAnswer():
            return rules.json(form.schema, is_strict=form.is_strict)
        case TextPattern("regex"):
            return rules.terminal(f"/{regex_to_lark(form.text)}/".replace("\n", r"\n"))
        case TextPattern():
            return rules.rule(f"%lark {{\n{form.text}\n}}")


def _in_channels(constraint: Constraint, conversation: Conversation, rules: Rules) -> str:
    """Return messages with headers: reasoning and remarks, then a call or the answer."""
    channel, message = rules.marker(CHANNEL), rules.marker(MESSAGE)
    again = f"{rules.text_until(END)} {rules.marker(START)} {literal('assistant')}"
    remark = f"{channel} ({literal('analysis')} | {literal('commentary')}) {message} {again}"
    final = f"{channel} {literal('final')} {message} ({_form(constraint.form, rules)})"
    calls = [
        f"{channel} {literal(f'commentary to={FUNCTIONS}{tool.name} ')} {rules.marker(CONSTRAIN)} "
        f"{literal('json')} {message} {rules.json(tool.parameters, is_strict=is_strict)}"
        for tool, is_strict in _tools(constraint, conversation)
    ]
    ends = calls if constraint.must_call is not None else [final, *calls]
    return f"({remark})* ({' | '.join(ends)})"
