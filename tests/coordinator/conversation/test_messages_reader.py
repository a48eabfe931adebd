"""Anthropic's Messages become the same conversations as chats."""

import pytest

from spmd_tx.coordinator.conversation.messages import Message, MessageImage, ToolCall
from spmd_tx.coordinator.conversation.messages_reader import read_messages
from spmd_tx.coordinator.conversation.messages_tools import read_tools
from spmd_tx.errors import WrongField

USE = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"n": 1}}
OTHER = USE | {"id": "toolu_2"}
ASK = {"role": "user", "content": "hi"}
CALLED = {"role": "assistant", "content": [USE, OTHER]}


def result(id, content, **more):
    return {"type": "tool_result", "tool_use_id": id, "content": content, **more}


def user(*blocks):
    return {"role": "user", "content": list(blocks)}


def text(text, **more):
    return {"type": "text", "text": text, **more}


def read(*messages, system=None, tools=(), parallel=True, seals=None):
    return read_messages(system, messages, read_tools(tools), parallel, (seals or {}).get)


def test_an_array_with_marks_is_the_same_as_a_string():
    plain = read(ASK, system="Be brief.")
    marked = read(
        user(text("hi", cache_control={"type": "ephemeral"}, citations=None)),
        system=[text("Be brief.", cache_control={"type": "ephemeral"})],
    )
    assert plain == marked


def test_billing_lines_are_dropped():
    billed = [text("x-anthropic-billing-header: cc_version=2.1.332.a1b;"), text("Be brief.\nAlways.")]
    assert read(ASK, system=billed) == read(ASK, system="Be brief.\nAlways.")


def test_instructions_may_stand_anywhere_and_empty_ones_are_none():
    messages = read(
        ASK, {"role": "system", "content": ""}, {"role": "system", "content": [text("Now.")]}, ASK
    )
    assert [each.role for each in messages.messages] == ["user", "system", "user"]


def test_results_are_put_in_the_order_of_their_calls_before_what_is_said_beside_them():
    results = user(result("toolu_2", "two"), text("go on"), result("toolu_1", [text("one")]))
    late = {"role": "system", "content": "Now."}
    expected = [("tool", "one"), ("tool", "two"), ("system", "Now."), ("user", "go on")]
    read_ones = read(ASK, CALLED, late, results).messages
    assert [(each.role, each.text) for each in read_ones[2:]] == expected
    assert [each.call_id for each in read_ones[2:4]] == ["call_1", "call_2"]
    assert read_ones[1].calls == (ToolCall("call_1", "look", {"n": 1}), ToolCall("call_2", "look", {"n": 1}))


def test_a_failed_tool_says_so_once():
    for content in ("gone", "<tool_use_error>gone</tool_use_error>"):
        messages = read(ASK, CALLED, user(result("toolu_1", content, is_error=True))).messages
        assert messages[2].text == "<tool_use_error>gone</tool_use_error>"


def test_thinking_becomes_reasoning_and_its_signature_names_the_turn():
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "ours"},
        {"type": "redacted_thinking", "data": "x"},
        text("a"),
        text("b"),
    ]
    messages = read(ASK, {"role": "assistant", "content": blocks}, ASK, seals={"ours": "r:0"}).messages
    assert messages[1] == Message("assistant", "ab", "hm", turn_id="r:0")
    forged = read(ASK, {"role": "assistant", "content": blocks}, ASK).messages
    assert forged[1] == Message("assistant", "ab", "hm")


def test_a_tool_that_waits_is_described_where_a_result_names_it():
    search = {"name": "ToolSearch", "input_schema": {"type": "object"}}
    late = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
    before = read(ASK, tools=[late | {"defer_loading": True}, search])
    assert [tool.name for tool in before.known_tools] == ["ToolSearch"]
    named = user(result("toolu_1", [{"type": "tool_reference", "tool_name": "look"}]))
    called = {"role": "assistant", "content": [USE | {"name": "ToolSearch"}]}
    for offered in ([late, search], [late | {"defer_loading": True}, search]):
        after = read(ASK, called, named, tools=offered)
        assert (after.tools, [tool.name for tool in after.later_tools]) == (before.tools, ["look"])
        assert '"description":"Looks."' in after.messages[2].text


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


def test_images_stand_between_blocks_and_in_results():
    messages = read(user(text("a"), IMAGE, text("b")), CALLED, user(result("toolu_1", [text("c"), IMAGE])))
    assert messages.messages[0] == Message("user", "ab", images=(MessageImage(1, "AAAA"),))
    assert messages.messages[2].images == (MessageImage(1, "AAAA"),)
    failed = read(ASK, CALLED, user(result("toolu_1", [text("c"), IMAGE], is_error=True))).messages[2]
    assert failed.text[: failed.images[0].at] == "<tool_use_error>c"


@pytest.mark.parametrize(
    "messages, place",
    [
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": "bob"}], "messages[0].name"),
        ([user({"type": "image", "source": {}})], "messages[0].content[0].source"),
        ([user(IMAGE | {"source": {"type": "url", "url": "https://x"}})], "messages[0].content[0].source"),
        ([user(IMAGE | {"source": {"type": "base64"}})], "messages[0].content[0].source.data"),
        ([ASK, {"role": "assistant", "content": [IMAGE]}], "messages[1].content[0].type"),
        ([user("x")], "messages[0].content[0].type"),
        ([user(text("x", weight=5))], "messages[0].content[0].weight"),
        ([user({"type": "text"})], "messages[0].content[0].text"),
        ([ASK, user(result("toolu_1", "x"))], "messages[1].content[0].tool_use_id"),
        ([ASK, CALLED, user(result("toolu_3", "x"))], "messages[2].content[0].tool_use_id"),
        (
            [ASK, CALLED, user(result("toolu_1", [{"type": "image"}]))],
            "messages[2].content[0].content[0].source",
        ),
        ([ASK, {"role": "assistant", "content": [USE | {"input": 5}]}, ASK], "messages[1].content[0].input"),
        ([ASK, {"role": "assistant", "content": "I"}], "messages"),
    ],
)
def test_what_cannot_be_read_is_named(messages, place):
    with pytest.raises(WrongField) as caught:
        read(*messages)
    assert caught.value.param == place


@pytest.mark.parametrize(
    "tool, place",
    [
        ({"type": "web_search_20250305", "name": "web_search"}, "tools[0].type"),
        ({"name": "a", "parameters": {}}, "tools[0].parameters"),
        ({"name": ""}, "tools[0]"),
        ({"name": "a", "input_schema": 5}, "tools[0].input_schema"),
    ],
)
def test_tools_that_are_not_the_clients_are_refused(tool, place):
    with pytest.raises(WrongField) as caught:
        read_tools([tool])
    assert caught.value.param == place
