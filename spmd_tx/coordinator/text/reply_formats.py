"""Which format the answers of a model have: found by the markers in its template and its vocabulary. Pure."""

from collections.abc import Collection
from dataclasses import dataclass

from spmd_tx.coordinator.text import call_syntaxes
from spmd_tx.coordinator.text.call_syntaxes import CallSyntax

THINK = ("<think>", "</think>")
BRACKET_THINK = ("[THINK]", "[/THINK]")

# Special tokens that end a turn; a request may also name other tokens.
ENDS = """
<|im_end|> <|endoftext|> <|eot_id|> <|eom_id|> <|end_of_text|> </s> <｜end▁of▁sentence｜> <|user|>
<|observation|> <|return|> <|call|> [EOS]
""".split()


_UNMISTAKABLE = (call_syntaxes.KIMI, call_syntaxes.DEEPSEEK, call_syntaxes.MISTRAL)  # by the opener alone


@dataclass(frozen=True)
class BareCalls:
    """Calls are JSON objects at the beginning of an answer, with ``;`` between them."""

    opener: str = "<|python_tag|>"  # which may stand before them, or behind text


@dataclass(frozen=True)
class Channels:
    """An answer is a run of messages with headers, which say what each of them is."""


@dataclass(frozen=True)
class ReplyFormat:
    """Says how a model writes reasoning and tool calls."""

    calls: CallSyntax | BareCalls | Channels | None  # None: its template knows no calls
    reasoning: tuple[str, str] | None  # the markers before and behind it
    ends: tuple[str, ...] = ()  # special tokens that end a turn, and are no part of its text


def find_format(template_source: str, special_tokens: Collection[str]) -> ReplyFormat | None:
    """Return the format of a model's answers; None if they are text and nothing else."""

    def has(text: str) -> bool:
        return text in template_source or text in special_tokens

    calls = _find_calls(template_source)
    if calls is None:
        calls = next((each for each in _UNMISTAKABLE if each.opener in special_tokens), None)
    reasoning = next((each for each in (BRACKET_THINK, THINK) if has(each[1])), None)
    if calls is None and reasoning is None:
        return None
    return ReplyFormat(calls, reasoning, tuple(end for end in ENDS if has(end)))


def _find_calls(source: str) -> CallSyntax | BareCalls | Channels | None:
    if "<|channel|>" in source and "<|message|>" in source:
        return Channels()
    for syntax in _UNMISTAKABLE:
        if syntax.opener in source:
            return syntax
    if call_syntaxes.HERMES.opener in source:
        if "<function=" in source:
            return call_syntaxes.QWEN_XML
        return call_syntaxes.GLM if "<arg_key>" in source else call_syntaxes.HERMES
    bare = BareCalls()
    if bare.opener in source or ('"parameters": ' in source and "ipython" in source):
        return bare
    return None
