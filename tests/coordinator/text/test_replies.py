"""What a model writes becomes reasoning, content and calls, in whatever pieces it comes."""

import pytest

from spmd_tx.coordinator.text import call_syntaxes
from spmd_tx.coordinator.text.reply_formats import THINK, ReplyFormat
from tests.support.replies import cut, read, said, thought

QWEN2 = ReplyFormat(call_syntaxes.HERMES, None, ("<|im_end|>",))
QWEN3 = ReplyFormat(call_syntaxes.HERMES, THINK, ("<|im_end|>",))
LOOK = '<tool_call>\n{"name": "look", "arguments": {"path": "a"}}\n</tool_call>'
CALLED = ("look", '{"path":"a"}')


@pytest.mark.parametrize(
    "format, prompt, text, events, status",
    [
        (QWEN2, "", "Yes.", [said("Yes.")], "ok"),
        (QWEN2, "", " Yes \n", [said(" Yes \n")], "ok"),
        (QWEN2, "", " Yes \n<|im_end|>", [said(" Yes \n")], "ok"),
        (QWEN2, "", LOOK, [CALLED], "ok"),
        (QWEN2, "", f"I look.\n{LOOK}\n{LOOK}<|im_end|>", [said("I look."), CALLED, CALLED], "ok"),
        (QWEN2, "", f"{LOOK}\n\nDone. ", [CALLED, said("Done. ")], "ok"),
        (QWEN2, "", "<think>x</think>", [said("<think>x</think>")], "ok"),
        (QWEN3, "", f"<think>\nHm.\n</think>\n\n{LOOK}", [thought("Hm."), CALLED], "ok"),
        (QWEN3, "", "\n<think>\n\n</think>\n\nYes.", [said("Yes.")], "ok"),
        (QWEN3, "…<think>\n", f"Hm.\n</think>\n\nYes.\n{LOOK}", [thought("Hm."), said("Yes."), CALLED], "ok"),
        (QWEN3, "…<think>\n\n</think>\n\n", "Yes.", [said("Yes.")], "ok"),
        (QWEN3, "Write <think> first.", "Yes.", [said("Yes.")], "ok"),
        (QWEN3, "", "Write <think> first.", [said("Write <think> first.")], "ok"),
        (QWEN3, "", f"<think>a {LOOK} b</think>c", [thought(f"a {LOOK} b"), said("c")], "ok"),
        (QWEN3, "", f"<think>a\n{LOOK}\n{LOOK}<|im_end|>", [thought("a"), CALLED, CALLED], "ok"),
        (QWEN3, "", "<think>Hm. <|im_end|>", [thought("Hm. ")], "open_reasoning"),
        (QWEN3, "<think>\n", "Hm", [thought("Hm")], "open_reasoning"),
        (QWEN3, "", "<think>a</think>b</think>", [thought("a"), said("b</think>")], "ok"),
    ],
)
def test_an_answer_is_read(format, prompt, text, events, status):
    assert read(format, [text], prompt) == (events, status)
    for seed in range(300):
        assert read(format, cut(text, seed), prompt) == (events, status)


@pytest.mark.parametrize(
    "inside, status",
    [
        ("", "broken"),
        ("look", "broken"),
        ("{}", "broken"),
        ("[]", "broken"),
        ('{"name": "look", "arguments": {"path": }}', "broken"),
        ('{"name": "look", "arguments": {"path": "a"}', "broken"),
        ('{"name": "look", "arguments": "a"}', "broken"),
        ('{"name": "look", "arguments": [1]}', "broken"),
        ('{"name": "look", "arguments": {"n": NaN}}', "broken"),
        ('{"name": "look", "arguments": {"n": 1e999}}', "broken"),
        ('{"name": "look", "arguments": {"path": "\\ud800"}}', "broken"),
        ('{"name": "look", "arguments": {"path": "a\nb"}}', "broken"),
        ('{"name": 5, "arguments": {}}', "broken"),
        ('{"name": "", "arguments": {}}', "broken"),
        ('{"name": "a b", "arguments": {}}', "broken"),
        ('{"name": "look", "arguments": ' + "[" * 100_000, "broken"),
    ],
    ids=lambda text: text[:50],
)
def test_a_broken_call_is_content(inside, status):
    raw = f"Hm.\n<tool_call>\n{inside}\n</tool_call>"
    assert read(QWEN3, [raw, "<|im_end|>"]) == ([said(raw)], status)
    after = [said(f"{raw}\n"), CALLED, said("ok")]
    assert read(QWEN3, [f"{raw}\n{LOOK}\nok"]) == ([said(raw), *after[1:]], status)


@pytest.mark.parametrize("length", range(len("Hm.\n<tool_call>"), len("Hm.\n" + LOOK)))
def test_an_unclosed_call_is_content(length):
    raw = f"Hm.\n{LOOK}"[:length]
    assert read(QWEN3, [raw]) == ([said(raw)], "unclosed")
    assert read(QWEN3, [raw, "<|im_end|>"]) == ([said(raw)], "unclosed")


@pytest.mark.parametrize(
    "written, arguments",
    [
        ('"arguments": {}', "{}"),
        ('"arguments": null', "{}"),
        ('"parameters": {"n" : 1}', '{"n":1}'),
        ('"type": "function"', "{}"),
        (r'"arguments": "{\"n\": 1}"', '{"n":1}'),
        ('"arguments": {"x" : 1.0,  "y":1e2, "z": "a\\u00fc ö"}', '{"x":1.0,"y":1e2,"z":"a\\u00fc ö"}'),
        ('"arguments": {"n": 123456789012345678901234567890}', '{"n":123456789012345678901234567890}'),
    ],
)
def test_arguments_are_compact_and_else_as_they_were_written(written, arguments):
    raw = f'<tool_call>{{"name": "look", {written}}}</tool_call>'
    assert read(QWEN3, [raw]) == ([("look", arguments)], "ok")


def test_a_call_of_an_unknown_tool_is_a_call():
    raw = '<tool_call>{"name": "fly"}</tool_call>'
    assert read(QWEN3, [raw]) == ([("fly", "{}")], "unknown_tool")


def test_without_tools_calls_are_text():
    text = f"<think>a {LOOK}</think>{LOOK}"
    assert read(QWEN3, [text], tools=[]) == ([thought(f"a {LOOK}"), said(LOOK)], "ok")
