"""What follows a sampled turn is what the model's own template writes behind it, in every family."""

from dataclasses import replace

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from spmd_tx.coordinator.conversation.messages import Message, Tool, ToolCall
from spmd_tx.coordinator.conversation.turns import SampledTurn
from spmd_tx.coordinator.text import continuation
from spmd_tx.coordinator.text.chat_template import ChatTemplate, RenderedParts
from spmd_tx.coordinator.text.continuation import Tail, TurnEnd, path_tokens, tail, to_render
from spmd_tx.coordinator.text.reply_formats import find_format
from spmd_tx.coordinator.text.template_messages import template_tools
from spmd_tx.coordinator.text.template_probe import probe
from tests.support import chat_templates as released
from tests.support.reply_templates import FAMILIES

TOOLS = [Tool("look", "Look at it.", {"type": "object", "properties": {"path": {"type": "string"}}})]
USER, RESULT = Message("user", "hello"), Message("tool", "seen", call_id="call_1")
CALLING = Message("assistant", "", "I think.", (ToolCall("call_1", "look", '{"path":"a"}'),))
TWICE = replace(CALLING, calls=(*CALLING.calls, ToolCall("call_2", "look", '{"path":"b"}')))
SAYING = Message("assistant", "Yes.", "I think.")
IM_END = TurnEnd("<|im_end|>", ("<|im_end|>", "<|user|>"))


@pytest.fixture
def texts(tokenizer):
    """The texts up to a turn and of all, and the markers of the family."""

    def texts(family, messages, known):
        made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=FAMILIES[family])
        template, options = ChatTemplate(made), {"tools": template_tools(TOOLS)}
        turns = to_render(messages, known, probe(template), drops_reasoning=True)
        assert turns is not None
        parts = template.render_parts(turns.messages, turns.known, options, 100_000, 10.0)
        assert parts.head is not None
        format = find_format(FAMILIES[family], ["<|user|>", "<|observation|>"])
        assert format is not None
        return parts.head, parts.whole, format.ends

    return texts


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "messages",
    [[USER, CALLING, RESULT], [USER, SAYING, Message("user", "go-on")]],
    ids=["result", "user"],
)
def test_sample_and_tail_are_the_whole_render(texts, family, messages):
    head, whole, ends = texts(family, messages, 2)
    if not whole.startswith(head):  # the template rewrites its last turn
        assert tail(RenderedParts(whole, head), TurnEnd(ends[0], ends)) is None
        return
    marker = next((each for each in ends if head.rstrip().endswith(each)), None)
    if marker is None:
        marker = next(each for each in ends if whole[len(head) :].startswith(each))
        sampled = head + marker
    else:
        sampled = head[: head.rindex(marker)] + marker
    found = tail(RenderedParts(whole, head), TurnEnd(marker, ends))
    assert found is not None
    assert (sampled + found.text, found.drops_stop) == (whole, False)


@pytest.mark.parametrize("family", FAMILIES)
def test_results_of_parallel_calls_follow_the_turn_in_every_family(texts, family):
    head, whole, ends = texts(family, [USER, TWICE, RESULT, replace(RESULT, call_id="call_2")], 2)
    found = tail(RenderedParts(whole, head), TurnEnd(ends[0], ends))
    assert found is not None
    assert found.text.count("seen") == 2


def test_not_every_template_is_said_to_rewrite(texts):
    heads = {family: texts(family, [USER, CALLING, RESULT], 2) for family in FAMILIES}
    rewriting = {family for family, (head, whole, _) in heads.items() if not whole.startswith(head)}
    assert rewriting <= {"gpt_oss"}


@pytest.mark.parametrize(
    ("head", "whole", "stop", "wanted"),
    [
        ("<|im_start|>a<|im_end|>\n", "<|im_start|>a<|im_end|>\nb", "<|im_end|>", Tail("\nb")),
        ("<|im_start|>a<|im_end|>\n", "<|im_start|>a<|im_end|>\nb", None, Tail("<|im_end|>\nb")),
        ("<|im_start|>a<|im_end|>\n", "<|im_start|>b<|im_end|>\n", "<|im_end|>", None),
        ("a", "a<|user|>b", "<|user|>", Tail("b")),
        ("a", "a<|user|>b", "<|im_end|>", Tail("<|user|>b", drops_stop=True)),
        ("a", "a<|user|>b", None, Tail("<|user|>b")),
        ("<|user|>a", "<|user|>a<|user|>b", "<|user|>", Tail("b")),
    ],
)
def test_the_end_of_a_turn_is_written_once(head, whole, stop, wanted):
    assert tail(RenderedParts(whole, head), replace(IM_END, stop=stop)) == wanted


def test_a_template_that_moves_messages_is_said_to_rewrite(tokenizer):
    moved = "{% for m in messages | reverse %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=moved))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    turns.append({"role": "user", "content": "c"})
    parts = template.render_parts(turns, 2, {}, 1000, 10.0)
    assert parts == RenderedParts("cba", "ba", "a")
    assert tail(parts, IM_END) is None


@pytest.mark.parametrize(
    ("said", "reasoning", "text"),
    [
        (replace(CALLING, reasoning=""), "", "\n<|im_start|>user\n<tool_response>\nseen\n</tool_response>"),
        (CALLING, "I think.", "\n<|im_start|>user\n<tool_response>\nseen\n</tool_response>"),
        (replace(SAYING, reasoning=""), "", "\n<|im_start|>user\ngo-on"),
        (SAYING, "I think.", None),
    ],
    ids=["call", "call with reasoning", "answer", "answer with reasoning"],
)
def test_a_template_that_writes_the_last_turn_in_its_own_way_goes_on(tokenizer, said, reasoning, text):
    """Qwen3's puts an empty thought into the last turn, and drops thoughts when a user speaks."""
    template = ChatTemplate(PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=released.QWEN3))
    messages = [USER, said, RESULT if said.calls else Message("user", "go-on")]
    turns = to_render(messages, 2, probe(template), drops_reasoning=True)
    assert turns is not None
    parts = template.render_parts(turns.messages, turns.known, {}, 100_000, 10.0)
    found = tail(parts, replace(IM_END, reasoning=reasoning))
    wanted = text and Tail(f"{text}<|im_end|>\n<|im_start|>assistant\n")
    assert found == wanted


def test_the_tokens_of_a_path_are_those_of_its_turns():
    def turn(parent, prompt, sampled, dropped=0):
        arrays = [np.asarray(each, np.int32) for each in (prompt, sampled)]
        message = Message("assistant")
        return SampledTurn("r:0", parent, dropped, *arrays, message, b"", (b"k",), None)

    first = turn(None, [1, 2], [3, 9])
    second = turn(first, [4], [5])
    third = turn(first, [6], [7], dropped=1)
    assert path_tokens(second) == [1, 2, 3, 9, 4, 5]
    assert path_tokens(third) == [1, 2, 3, 6, 7]


def test_a_turn_whose_calls_a_template_splits_is_written_as_one(tokenizer):
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=FAMILIES["llama_3"])
    turns = to_render([USER, TWICE, RESULT], 2, probe(ChatTemplate(made)), drops_reasoning=True)
    assert turns is not None
    assert [message["content"] for message in turns.messages] == ["hello", continuation.PLAIN, "seen"]
