"""The traps of each family: values without types, calls without markers, headers that say nothing."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_tx.coordinator.text import call_syntaxes
from spmd_tx.coordinator.text.argument_values import SPELLINGS, json_value
from spmd_tx.coordinator.text.reply_formats import THINK, BareCalls, Channels, ReplyFormat
from tests.support.replies import cut, read, said, thought

QWEN = ReplyFormat(call_syntaxes.QWEN_XML, THINK, ("<|im_end|>",))
GLM = ReplyFormat(call_syntaxes.GLM, THINK, ("<|observation|>",))
LLAMA = ReplyFormat(BareCalls(), None, ("<|eot_id|>", "<|eom_id|>"))
MISTRAL = ReplyFormat(call_syntaxes.MISTRAL, None, ("</s>",))
DEEPSEEK = ReplyFormat(call_syntaxes.DEEPSEEK, THINK, ("<｜end▁of▁sentence｜>",))
KIMI = ReplyFormat(call_syntaxes.KIMI, THINK, ("<|im_end|>",))
GPT = ReplyFormat(Channels(), None, ("<|return|>", "<|call|>"))
DEEPSEEK_CALL = '<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"n": 1}<｜tool▁call▁end｜>'
BEGUN = "<|start|>assistant"  # what the prompts of GPT end with

LOOK = ("look", '{"n":1}')
OBJECT = '{"name": "look", "parameters": {"n": 1}}'


def one_result(format, text, prompt=""):
    """What an answer is read as, in whatever pieces it comes."""
    found = read(format, [text], prompt)
    for seed in range(50):
        assert read(format, cut(text, seed), prompt) == found
    return found


def xml(inside):
    return f"<tool_call>\n<function=look>\n{inside}</function>\n</tool_call>"


@pytest.mark.parametrize(
    "inside, arguments",
    [
        ("", "{}"),
        ("<parameter=path>\n\n  a\n\n</parameter>\n", '{"path":"\\n  a\\n"}'),
        ("<parameter=path>a</parameter><parameter=n>\n1\n</parameter>", '{"path":"a","n":1}'),
        ("<parameter=path>\n</parameter>\n", '{"path":""}'),
        ("<parameter=path>\nx</parameter>y\n</parameter>\n", '{"path":"x</parameter>y"}'),
        ("<parameter=path>\n<parameter=n>\n</parameter>\n", '{"path":"<parameter=n>"}'),
        ("<parameter=odd>\n5\n</parameter>\n", '{"odd":"5"}'),
        (
            "<parameter=deep>\nTrue\n</parameter>\n<parameter=note>\nNone\n</parameter>\n",
            '{"deep":true,"note":null}',
        ),
    ],
)
def test_xml_values_lose_one_newline_on_each_side(inside, arguments):
    assert one_result(QWEN, xml(inside)) == ([("look", arguments)], "ok")


@pytest.mark.parametrize(
    "raw",
    [
        "<tool_call>\n</tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=look\n</function>\n</tool_call>",
        xml("<parameter=path>\na\n"),
        xml("a\n<parameter=path>\na\n</parameter>\n"),
        xml("<parameter=path>\na\n</parameter>\n") + "</tool_call>",
        "<tool_call>\n<function=look>\n</tool_call>",
        '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>',
    ],
)
def test_broken_xml_is_content(raw):
    events, status = one_result(QWEN, raw)
    if raw.count("</tool_call>") == 1:
        assert (events, status) == ([said(raw)], "broken")
    else:  # a marker too many is text behind a call
        assert (events, status) == ([("look", '{"path":"a"}'), said("</tool_call>")], "ok")


@pytest.mark.parametrize(
    "text, schema, value",
    [
        ("5", {"type": "string"}, '"5"'),
        ("5", {"type": "integer"}, "5"),
        ("5.0", {"type": "integer"}, "5.0"),
        ("5.5", {"type": "integer"}, '"5.5"'),
        ("five", {"type": "integer"}, '"five"'),
        ("1e2", {"type": "number"}, "1e2"),
        ("NaN", {"type": "number"}, '"NaN"'),
        ("1e999", {"type": "number"}, '"1e999"'),
        ("9" * 5000, {"type": "string"}, '"' + "9" * 5000 + '"'),
        ("true", {"type": "boolean"}, "true"),
        (" False\n", {"type": "boolean"}, "false"),
        ("1", {"type": "boolean"}, '"1"'),
        ("[1, 2]", {"type": "array"}, "[1,2]"),
        ("[1, 2", {"type": "array"}, '"[1, 2"'),
        ("[" * 100_000, {"type": "array"}, '"' + "[" * 100_000 + '"'),
        ('{"a" : 1}', {"type": "object"}, '{"a":1}'),
        ("null", {"type": ["string", "null"]}, "null"),
        ("null", {"type": "string"}, '"null"'),
        ("5", {"type": ["string", "integer"]}, '"5"'),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "5"),
        ("None", {"type": "integer", "nullable": True}, "null"),
        ("2", {"enum": [1, 2]}, "2"),
        ("a", {"enum": ["a", 1]}, '"a"'),
        ("3", {"const": 3}, "3"),
        ('{"a": 1}', {"$ref": "#/$defs/Edit"}, '{"a":1}'),
        ("5", {"$ref": "#/$defs/Missing"}, '"5"'),
        ("5", {"$ref": "#/$defs/Circle"}, "5"),
        ("5", {}, '"5"'),
        ("5", None, '"5"'),
        ("5", {"type": 7, "anyOf": [3], "enum": "x"}, '"5"'),
        ('a\n"ü"', {"type": "string"}, '"a\\n\\"ü\\""'),
    ],
    ids=lambda part: str(part)[:40],
)
def test_a_value_has_the_type_that_the_schema_wants(text, schema, value):
    circle = {"anyOf": [{"$ref": "#/$defs/Circle"}, {"type": "integer"}]}
    assert json_value(text, schema, {"$defs": {"Edit": {"type": "object"}, "Circle": circle}}) == value


SCHEMA_KEYS = ["type", "enum", "const", "anyOf", "oneOf", "$ref", "$defs", "nullable", "a", "properties"]
SCHEMAS = st.recursive(
    st.sampled_from(["integer", "string", "#/$defs/a", "#", True, None, 3]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(SCHEMA_KEYS), inner, max_size=4)
    ),
)


@settings(max_examples=300, deadline=None)
@given(schema=SCHEMAS, root=st.dictionaries(st.sampled_from(SCHEMA_KEYS), SCHEMAS), text=st.text(max_size=4))
def test_whatever_the_schema_says_a_value_is_json_of_the_text(schema, root, text):
    read = json.loads(json_value(text, schema, root))
    assert read == text or json.loads(str(SPELLINGS.get(text.strip(), text))) == read


def test_a_schema_too_deep_to_read_leaves_text():
    deep: Any = {"type": "integer"}
    for _ in range(5000):
        deep = {"anyOf": [deep]}
    assert json_value("5", deep, {}) == '"5"'


@pytest.mark.parametrize(
    "format, text, events, status",
    [
        (GLM, "<think></think>\n<tool_call>now</tool_call><|observation|>", [("now", "{}")], "ok"),
        (
            GLM,
            "<tool_call>look\n<arg_key>path</arg_key>\n"
            "<arg_value>\n a</arg_value></b>\n</arg_value></tool_call>",
            [("look", '{"path":"\\n a</arg_value></b>\\n"}')],
            "ok",
        ),
        (LLAMA, f" {OBJECT}<|eot_id|>", [LOOK], "ok"),
        (LLAMA, f"<|python_tag|>{OBJECT}; {OBJECT}<|eom_id|>", [LOOK, LOOK], "ok"),
        (LLAMA, f"{OBJECT} ;{OBJECT}\n", [LOOK, LOOK], "ok"),
        (LLAMA, f"{OBJECT}{OBJECT}", [LOOK, LOOK], "ok"),
        (LLAMA, f"{OBJECT} Done.", [LOOK, said("Done.")], "ok"),
        (LLAMA, f"I look: {OBJECT}", [said(f"I look: {OBJECT}")], "ok"),
        (LLAMA, f"I look.\n<|python_tag|>{OBJECT}", [said("I look."), LOOK], "ok"),
        (LLAMA, '{"a": "}", "b": [{}]} is JSON', [said('{"a": "}", "b": [{}]} is JSON')], "ok"),
        (LLAMA, '{"name": "Bob", "age": 5}', [said('{"name": "Bob", "age": 5}')], "broken"),
        (LLAMA, '{"name": "Bob"}', [said('{"name": "Bob"}')], "broken"),
        (LLAMA, '{"name": "look", "parameters": {"path": "\\"}{"}}', [("look", '{"path":"\\"}{"}')], "ok"),
        (LLAMA, OBJECT[:-1], [said(OBJECT[:-1])], "unclosed"),
        (LLAMA, "<|python_tag|>print(1)", [said("<|python_tag|>print(1)")], "broken"),
        (MISTRAL, '[TOOL_CALLS] [{"name": "look", "arguments": {"n": 1}, "id": "a"}]</s>', [LOOK], "ok"),
        (MISTRAL, '[TOOL_CALLS]{"name": "look", "arguments": {"n": 1}}', [LOOK], "ok"),
        (MISTRAL, 'Yes.[TOOL_CALLS]look[CALL_ID]123456789[ARGS]{"n": 1}', [said("Yes."), LOOK], "ok"),
        (MISTRAL, '[TOOL_CALLS]look[ARGS]{"n": 1}[TOOL_CALLS]look[ARGS]{"n": 1}', [LOOK, LOOK], "ok"),
        (MISTRAL, '[TOOL_CALLS]look[ARGS]{"n": ', [said('[TOOL_CALLS]look[ARGS]{"n": ')], "unclosed"),
        (MISTRAL, '[TOOL_CALLS]look[ARGS]{"n": </s>', [said('[TOOL_CALLS]look[ARGS]{"n": ')], "broken"),
        (MISTRAL, "[TOOL_CALLS][]</s>", [said("[TOOL_CALLS][]")], "broken"),
        (
            DEEPSEEK,
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{"n": 1}\n```'
            f"<｜tool▁call▁end｜>\n{DEEPSEEK_CALL}<｜tool▁calls▁end｜>",
            [LOOK, LOOK],
            "ok",
        ),
        (
            DEEPSEEK,
            f"<think>Hm.<｜tool▁calls▁begin｜>{DEEPSEEK_CALL}",
            [thought("Hm."), LOOK],
            "ok",
        ),
        (
            KIMI,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:12<|tool_call_argument_begin|>"
            '{"n": 1}<|tool_call_end|>'
            '<|tool_call_begin|>look<|tool_call_argument_begin|>{"n": 1}<|tool_call_end|>'
            "<|tool_calls_section_end|><|im_end|>",
            [LOOK, LOOK],
            "ok",
        ),
    ],
)
def test_each_family_has_its_traps(format, text, events, status):
    assert one_result(format, text) == (events, status)


CALL = ' to=functions.look <|constrain|>json<|message|>{"n": 1}'


@pytest.mark.parametrize(
    "text, events, status",
    [
        (f"<|channel|>commentary{CALL}<|call|>", [LOOK], "ok"),
        (f"<|channel|>commentary{CALL}", [LOOK], "ok"),
        (' to=functions.look<|channel|>commentary json<|message|>{"n": 1}<|call|>', [LOOK], "ok"),
        (f"<|channel|>analysis{CALL}<|call|>", [LOOK], "ok"),
        ("<|channel|>commentary to=python code<|message|>{}<|call|>", [("python", "{}")], "unknown_tool"),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
            "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
            f"<|start|>assistant<|channel|>commentary{CALL}<|call|>",
            [thought("Hm.\n\nSo."), said("I look."), LOOK],
            "ok",
        ),
        ("<|channel|>final<|message|>Yes.<|return|>", [said("Yes.")], "ok"),
        ("<|channel|>analysis<|message|>Hm.", [thought("Hm.")], "open_reasoning"),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assist",
            [thought("Hm."), said("<|start|>assist")],
            "broken",
        ),
        ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", [thought("Hm.")], "ok"),
        ("<|channel|>thoughts<|message|>Hm.<|end|>", [said("<|channel|>thoughts<|message|>Hm.")], "broken"),
        ("<|channel|>final now<|message|>Hm.<|end|>", [said("<|channel|>final now<|message|>Hm.")], "broken"),
        ("Hello<|return|>", [said("Hello")], "broken"),
        ("Hello", [said("Hello")], "broken"),
        (f"<|channel|>commentary{CALL}x<|call|>", [said(f"<|channel|>commentary{CALL}x")], "broken"),
        (f"<|channel|>commentary{CALL[:-1]}", [said(f"<|channel|>commentary{CALL[:-1]}")], "unclosed"),
        (f"<|channel|>commentary{CALL[:24]}", [said(f"<|channel|>commentary{CALL[:24]}")], "unclosed"),
        ("<|channel|>final<|message|>a <|message|> b", [said("a <|message|> b")], "ok"),
    ],
)
def test_messages_are_read_by_their_headers(text, events, status):
    assert one_result(GPT, text, BEGUN) == (events, status)
    if status == "ok":
        assert one_result(GPT, f"{BEGUN}{text}") == (events, status)


def test_without_tools_a_message_to_one_is_text():
    raw = f"<|channel|>commentary{CALL}"
    assert read(GPT, [raw, "<|call|>"], BEGUN, tools=[]) == ([said(raw)], "ok")
    assert read(LLAMA, [OBJECT], tools=[]) == ([said(OBJECT)], "ok")
