"""What a client says reaches the model of every family, in a form that its template takes."""

import pytest
from transformers import PreTrainedTokenizerFast

from spmd_tx.coordinator.conversation.messages import Message, Tool, ToolCall
from spmd_tx.coordinator.text.chat_template import ChatTemplate
from spmd_tx.coordinator.text.template_messages import template_messages, template_tools
from spmd_tx.coordinator.text.template_probe import probe
from spmd_tx.errors import NotRendered
from tests.support.reply_templates import FAMILIES

TOOLS = [Tool("look", "Look at it.", {"type": "object", "properties": {"path": {"type": "string"}}})]


def called(*ids, text="", reasoning=""):
    calls = [ToolCall(id, "look", f'{{"path": "of-{id}"}}') for id in ids]
    return Message("assistant", text, reasoning, tuple(calls))


def result(id):
    return Message("tool", f"seen-{id}", call_id=id)


USER = Message("user", "hello")
AGENT = [
    Message("system", "be-brief"),
    Message("developer", "be-kind"),
    USER,
    called("call_1", "call_2", text="i-say", reasoning="i-think"),
    result("call_1"),
    result("call_2"),
    Message("system", "stop-soon"),
    Message("user", "go-on"),
]


@pytest.fixture
def write(tokenizer):
    """The messages that a template gets, and the text that it makes of them."""

    def write(family, messages, *, drops_reasoning=False, tools=TOOLS):
        made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=FAMILIES[family])
        template = ChatTemplate(made)
        written = template_messages(messages, probe(template), drops_reasoning=drops_reasoning)
        return written, template.render(written, {"tools": template_tools(tools)}, 100_000, 10.0)

    return write


@pytest.mark.parametrize("family", FAMILIES)
def test_all_that_an_agent_says_is_rendered_in_its_order(write, family):
    _, text = write(family, AGENT, drops_reasoning=True)
    said = ["be-brief", "be-kind", "hello", "i-say", "of-call_1", "seen-call_1", "seen-call_2", "go-on"]
    places = [text.index(each) for each in said]
    assert places == sorted(places)
    assert text.index("seen-call_2") < text.index("stop-soon") < text.index("go-on")
    assert "of-call_2" in text
    assert "Look at it." in text


def test_calls_are_turns_of_their_own_where_a_template_takes_one(write):
    written, _ = write("llama_3", [USER, called("a", "b"), result("a"), result("b")])
    assert [each.get("tool_call_id", len(each.get("tool_calls", []))) for each in written] == [
        0,
        1,
        "a",
        1,
        "b",
    ]


def test_later_instructions_are_reminders_of_the_user_where_a_template_moves_them(write):
    written, _ = write("deepseek_v3_1", AGENT, drops_reasoning=True)
    assert written[-2] == {"role": "user", "content": "<system-reminder>\nstop-soon\n</system-reminder>"}
    kept, _ = write("qwen2_5", [USER, Message("assistant", "x"), Message("system", "stop-soon"), USER])
    assert kept[2] == {"role": "system", "content": "stop-soon"}


def test_the_tokens_of_kimi_have_ids_that_count_over_the_conversation(write):
    talk = [USER, called("a", "b"), result("a"), result("b"), called("c"), result("c")]
    written, _ = write("kimi_k2", talk)
    ids = [call["id"] for each in written for call in each.get("tool_calls", [])]
    assert ids == ["functions.look:0", "functions.look:1", "functions.look:2"]
    assert [each["tool_call_id"] for each in written if each["role"] == "tool"] == ids


def test_older_mistrals_have_ids_of_nine_letters(write):
    written, _ = write(
        "mistral_v3", [USER, called("call_1", "abcdefghi"), result("call_1"), result("abcdefghi")]
    )
    first, second = [call["id"] for call in written[1]["tool_calls"]]
    assert (len(first), first.isalnum(), second) == (9, True, "abcdefghi")
    assert [each["tool_call_id"] for each in written[2:]] == [first, second]


def test_arguments_that_a_model_has_broken_stay_text_where_a_template_takes_text(write):
    broken = Message("assistant", calls=(ToolCall("a", "look", '{"path": '),))
    _, text = write("kimi_k2", [USER, broken, result("a")])
    assert '{"path": ' in text


def test_reasoning_is_dropped_only_where_the_model_writes_it_and_its_template_does_not(write):
    talk = [USER, Message("assistant", "i-say", "i-think"), USER]
    with pytest.raises(NotRendered, match="leaves out reasoning_content"):
        write("qwen2_5", talk)
    _, text = write("qwen2_5", talk, drops_reasoning=True)
    assert "i-think" not in text
    written, _ = write("qwen3", talk, drops_reasoning=True)
    assert written[1]["reasoning_content"] == "i-think"


def test_calls_without_ids_keep_their_results(write):
    call = ToolCall(None, "look", {"path": "x"})
    talk = [USER, Message("assistant", calls=(call, call)), Message("tool", "one"), Message("tool", "two")]
    _, text = write("llama_3", talk)
    assert text.count("one") == text.count("two") == 1
