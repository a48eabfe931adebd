"""The items of OpenAI's Responses become the same conversations as chats."""

import pytest

from spmd_tx.coordinator.conversation.messages import Message, MessageImage, ToolCall
from spmd_tx.coordinator.conversation.responses_reader import read_items
from spmd_tx.coordinator.conversation.responses_tools import read_tools
from spmd_tx.errors import WrongField

ASK = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
ARGUMENTS = '{ "path" : "a\\u00fc",  "n": 1.0, "m":1e2}'
CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look", "arguments": ARGUMENTS}
THOUGHT = {
    "type": "reasoning",
    "summary": [{"type": "summary_text", "text": "hm"}],
    "encrypted_content": "ours",
}
SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]}
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}


def output(id, text):
    return {"type": "function_call_output", "call_id": id, "output": text}


def read(*items, instructions=None, tools=()):
    return read_items(instructions, list(items), read_tools(tools), True, {"ours": "r:0"}.get)


def test_a_text_is_what_the_user_says():
    assert read_items("Be brief.", "hi", read_tools([]), True, {}.get) == read(ASK, instructions="Be brief.")


def test_a_run_of_items_is_one_turn_and_arguments_stay_as_they_are():
    messages = read(
        ASK, THOUGHT, SAID, CALL, output("call_1", [{"type": "input_text", "text": "red"}])
    ).messages
    called = ToolCall("call_1", "look", ARGUMENTS)
    assert messages[1] == Message("assistant", "I look.", "hm", (called,), turn_id="r:0")
    assert messages[2] == Message("tool", "red", call_id="call_1")


def test_reasoning_begins_another_turn():
    foreign = THOUGHT | {"encrypted_content": "forged"}
    messages = read(ASK, THOUGHT, SAID, foreign, SAID).messages
    assert [(each.reasoning, each.text, each.turn_id) for each in messages[1:]] == [
        ("hm", "I look.", "r:0"),
        ("hm", "I look.", None),
    ]
    same = read(ASK, THOUGHT, SAID, THOUGHT, CALL).messages
    assert len(same) == 2
    assert same[1].reasoning == "hmhm"


def test_images_of_a_turn_stand_behind_the_texts_of_its_earlier_items():
    drawn = {"type": "input_image", "image_url": "data:image/png;base64,aa"}
    sketch = {"role": "assistant", "content": [{"type": "output_text", "text": "So:"}, drawn]}
    (turn,) = read(SAID, sketch).messages
    assert turn == Message("assistant", "I look.So:", images=(MessageImage(len("I look.So:"), "aa"),))


def test_outputs_come_in_any_order():
    other = CALL | {"call_id": "call_2"}
    messages = read(ASK, CALL, other, output("call_2", "two"), output("call_1", "one")).messages
    assert [each.text for each in messages[2:]] == ["one", "two"]


def test_tools_in_namespaces_have_both_names_for_the_model():
    space = {"type": "namespace", "name": "files", "tools": [LOOK, {"type": "custom", "name": "patch"}]}
    mcp = {"type": "namespace", "name": "mcp__git__", "tools": [LOOK]}
    offered = read_tools([space, mcp, LOOK, {"type": "web_search"}, {"type": "custom", "name": "patch"}])
    assert [tool.name for tool in offered.tools] == ["files__look", "mcp__git__look", "look"]
    assert offered.places["mcp__git__look"] == ("mcp__git__", "look")
    (call,) = read(ASK, CALL | {"namespace": "files"}).messages[1].calls
    assert call.name == "files__look"


def test_calls_of_tools_without_a_schema_have_one_argument():
    custom = {"type": "custom_tool_call", "call_id": "call_1", "name": "patch", "input": "a\nb"}
    result = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"}
    messages = read(ASK, custom, result).messages
    assert messages[1].calls == (ToolCall("call_1", "patch", '{"input":"a\\nb"}'),)
    assert messages[2].text == "done"


def test_items_that_say_nothing_are_left_out():
    assert read(ASK, {"type": "web_search_call", "id": "ws_1"}) == read(ASK)


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}


def test_images_stand_in_messages_and_in_outputs():
    said = {"role": "user", "content": [{"type": "input_text", "text": "a"}, IMAGE]}
    messages = read(said, CALL, output("call_1", [IMAGE])).messages
    assert messages[0] == Message("user", "a", images=(MessageImage(1, "AAAA"),))
    assert messages[2] == Message("tool", call_id="call_1", images=(MessageImage(0, "AAAA"),))


@pytest.mark.parametrize(
    "items, place",
    [
        ([5], "input[0]"),
        ([{"role": "tool", "content": "x"}], "input[0]"),
        ([ASK | {"role": {}}], "input[0]"),
        ([ASK | {"type": []}], "input[0].type"),
        ([ASK | {"content": [{"type": [], "text": "x"}]}], "input[0].content[0]"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].image_url"),
        ([ASK, CALL, output("call_1", [IMAGE | {"image_url": "x"}])], "input[2].output[0].image_url"),
        ([ASK, output("call_1", "x")], "input[1].call_id"),
        ([ASK, CALL, output("call_2", "x")], "input[2].call_id"),
        ([ASK, CALL | {"arguments": {}}], "input[1].arguments"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0]"),
    ],
)
def test_what_cannot_be_read_is_named(items, place):
    with pytest.raises(WrongField) as caught:
        read(*items)
    assert caught.value.param == place


@pytest.mark.parametrize(
    "tool, place",
    [
        ({"type": "namespace", "name": "a"}, "tools[0]"),
        ({"type": "function", "name": 5}, "tools[0]"),
        ({"type": "function", "name": "a", "parameters": 5}, "tools[0].parameters"),
        ({"type": "namespace", "name": "a", "tools": [{"name": ""}]}, "tools[0].tools[0]"),
    ],
)
def test_broken_tools_are_named(tool, place):
    with pytest.raises(WrongField) as caught:
        read_tools([tool])
    assert caught.value.param == place
