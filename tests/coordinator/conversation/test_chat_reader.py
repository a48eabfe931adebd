import pytest

from spmd_tx.coordinator.conversation.chat_reader import read_conversation
from spmd_tx.coordinator.conversation.messages import Message, MessageImage, Tool, ToolCall
from spmd_tx.errors import InvalidRequest

USER = {"role": "user", "content": "hi"}


def calls(*ids):
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id in ids
        ],
    }


def result(id, content="ok"):
    return {"role": "tool", "content": content} | ({} if id is None else {"tool_call_id": id})


def conversation(messages, tools=None):
    return list(read_conversation(messages, tools, True).messages)


def ids(messages):
    return [each.call_id for each in messages if each.role == "tool"]


@pytest.mark.parametrize(
    "sent, order",
    [
        ([calls("a", "b", "c"), result("c"), result("a"), result("b")], ["a", "b", "c"]),
        ([calls("a", "b"), result("b"), result("a"), USER, calls("c"), result("c")], ["a", "b", "c"]),
        ([calls("b", "a"), result("a"), result("a"), result("b")], ["b", "a", "a"]),
        ([calls("a", "b"), result("b"), result(None)], ["b", None]),
        ([result(None)], [None]),
    ],
)
def test_results_stand_in_the_order_of_their_calls(sent, order):
    assert ids(conversation([USER, *sent])) == order


def image(url, **more):
    return {"type": "image_url", "image_url": {"url": url, **more}}


def test_images_stand_between_the_texts_of_a_message():
    parts = ["a", "b", image("data:image/png;base64,AAAA", detail="auto"), "c", image("data:;base64,BBBB")]
    content = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
    (message,) = conversation([USER | {"content": content}])
    assert message.text == "a\nbc"
    assert message.images == (MessageImage(3, "AAAA"), MessageImage(4, "BBBB"))
    (called, shown) = conversation([calls("a"), result("a", content[2:3])])
    assert shown == Message("tool", call_id="a", images=(MessageImage(0, "AAAA"),))
    assert called.images == ()


@pytest.mark.parametrize(
    "sent, complaint",
    [
        ([calls("a"), result("b")], "message 2: tool_call_id 'b' is of no call .* whose calls are 'a'"),
        ([calls("a"), result("a"), USER, result("a")], "message 4: tool_call_id 'a' .* are none"),
        ([result("a")], "message 1: .* are none; send results right behind their calls"),
        ([calls(*map(str, range(99))), result("x" * 9999)], "'xxx.*\\.\\.\\. is of no call"),
        ([result(["a"])], "tool_call_id is \\['a'\\]; send a text"),
        ([calls({"a": 1})], "id is {'a': 1}; send a text"),
        ([USER | {"role": None}], "message 1 has no role"),
        ([USER | {"content": 5}], "content is 5; send text"),
        (
            [USER | {"content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "image_url.url is 'x'; images are never fetched, so send a PNG or JPEG as a data URI",
        ),
        ([USER | {"content": [image("https://x/a.png")]}], "images are never fetched"),
        ([USER | {"content": [image("data:,", detail="low")]}], "detail is 'low'; images keep their size"),
        ([USER | {"content": [{"type": "input_audio", "input_audio": {}}]}], "part of type 'input_audio'"),
        ([USER | {"content": [{"type": "refusal", "refusal": "no"}]}], "part of type 'refusal'"),
        ([USER | {"content": ["text"]}], "part of type 'text'"),
        (
            [USER | {"content": [{"type": "text", "text": "a", "annotations": [1]}]}],
            "a part of text with annotations",
        ),
        ([USER | {"tool_calls": "f"}], "tool_calls is 'f'; send a list"),
        ([USER | {"tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}], "of type 'custom'"),
        (
            [USER | {"tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
            "arguments is 5; send a JSON",
        ),
    ],
)
def test_what_is_no_conversation_is_refused_by_name(sent, complaint):
    with pytest.raises(InvalidRequest, match=complaint):
        conversation([USER, *sent])


def test_parts_of_text_are_joined_and_marks_for_caches_are_dropped():
    parts = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "b", "annotations": []},
    ]
    sent = USER | {"content": parts, "cache_control": {"type": "ephemeral"}}
    assert conversation([sent]) == [Message("user", "a\nb")]


def test_very_many_results_take_no_more_than_their_number():
    names = [str(number) for number in range(30_000)]
    sent = conversation([calls(*names), *map(result, reversed(names))])
    assert ids(sent) == names


ASSISTANT = {"role": "assistant", "content": None}


@pytest.mark.parametrize(
    "sent, reasoning, others",
    [
        ({"reasoning_content": "a"}, "a", {}),
        ({"reasoning": "a", "reasoning_content": "a", "thinking": None}, "a", {}),
        ({"thinking": "a"}, "a", {}),
        ({"reasoning": "b", "reasoning_content": "a"}, "a", {"reasoning": "b"}),
        ({"reasoning": {"effort": "low"}}, "", {"reasoning": {"effort": "low"}}),
        ({"refusal": None, "annotations": [], "name": "Bob"}, "", {"annotations": [], "name": "Bob"}),
    ],
)
def test_reasoning_is_read_under_all_of_its_names(sent, reasoning, others):
    (message,) = conversation([ASSISTANT | sent])
    assert message == Message("assistant", reasoning=reasoning, others=others)


@pytest.mark.parametrize("arguments", ['{"a": ', "no JSON", '{"a": 1e3}', {"a": 1}, ""])
def test_arguments_stay_what_the_model_has_written(arguments):
    call = {"id": "x", "type": "function", "index": 0, "function": {"name": "f", "arguments": arguments}}
    (message,) = conversation([ASSISTANT | {"tool_calls": [call]}])
    assert message.calls == (ToolCall("x", "f", arguments),)


def test_tools_have_a_schema_in_any_case():
    schema = {"type": "object", "properties": {"z": {}, "a": {}}}
    sent = [
        {
            "type": "function",
            "function": {"name": "f", "description": "Do.", "parameters": schema, "strict": True},
        },
        {"function": {"name": "g", "description": None, "parameters": None}},
    ]
    read = read_conversation([USER], sent, True)
    nothing = {"type": "object", "properties": {}}
    assert read.tools == (Tool("f", "Do.", schema), Tool("g", "", nothing))
    assert list(read.tools[0].parameters["properties"]) == ["z", "a"]
