"""Every family's answers are read as its own template writes them, and what is broken in them is content."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from spmd_tx.coordinator.text import call_syntaxes
from spmd_tx.coordinator.text.call_syntaxes import CallSyntax
from spmd_tx.coordinator.text.channel_replies import CHANNEL, END, MESSAGE, START
from spmd_tx.coordinator.text.reply_formats import BRACKET_THINK, THINK, BareCalls, Channels, find_format
from tests.support.replies import TOOLS, cut, read, said, thought
from tests.support.reply_templates import FAMILIES

ARGUMENTS = {
    "path": '  a "b"\n\n\tc\n',
    "n": 3,
    "x": -1.5,
    "deep": True,
    "list": [1, "b", None],
    "edit": {"old": "</x>", "new": {}},
    "note": None,
}
WANTED = ("look", json.dumps(ARGUMENTS, separators=(",", ":")))
WIRE_TOOLS = [
    {"type": "function", "function": {"name": each.name, "description": "", "parameters": each.parameters}}
    for each in TOOLS
]
SPECIAL = ["</s>"]
ONE_CALL = {"llama_3", "gpt_oss"}  # in a turn
CALLS_OR_TEXT = {"llama_3", "gpt_oss", "mistral_v3"}
THINKING = set(FAMILIES) - {"qwen2_5", "llama_3", "mistral_v3", "deepseek_v3_1"}
HEADERS = ["assistant", "analysis"]
ARGUMENTS_AS_TEXT = {"deepseek_r1", "deepseek_v3_1"}


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def render(tokenizer):
    """Renders a turn; returns the prompt, and the turn as the model would sample it."""
    made: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer)

    def render(family, turn):
        history = [{"role": "user", "content": "hi"}]
        options = {"tools": WIRE_TOOLS, "tokenize": False, "chat_template": FAMILIES[family]}
        prompt = made.apply_chat_template(history, add_generation_prompt=True, **options)
        rendered = made.apply_chat_template([*history, turn], **options)
        assert rendered.startswith(prompt)
        return prompt, rendered.removeprefix(prompt)

    return render


def calls(family, count, arguments=ARGUMENTS, name="look"):
    if family in ARGUMENTS_AS_TEXT:
        arguments = json.dumps(arguments)
    ids = [f"functions.{name}:{n}" if family == "kimi_k2" else f"abcdefg{n:02}" for n in range(count)]
    function = {"name": name, "arguments": arguments}
    return [{"id": each, "type": "function", "function": function} for each in ids]


def turn(family, count, *, content="Yes.", **more):
    return {
        "role": "assistant",
        "content": "" if count and family in CALLS_OR_TEXT else content,
        "reasoning_content": "Hm.\n\n  Well.",
        "thinking": "Hm.\n\n  Well.",
        **({"tool_calls": calls(family, count, **more)} if count else {}),
    }


def test_the_format_is_found_by_the_markers_of_the_template(family):
    found = find_format(FAMILIES[family], [])
    assert found is not None
    wanted = {
        "qwen2_5": call_syntaxes.HERMES,
        "qwen3": call_syntaxes.HERMES,
        "qwen3_5": call_syntaxes.QWEN_XML,
        "llama_3": BareCalls(),
        "mistral_v3": call_syntaxes.MISTRAL,
        "mistral_v11": call_syntaxes.MISTRAL,
        "glm_4_5": call_syntaxes.GLM,
        "glm_4_7": call_syntaxes.GLM,
        "deepseek_r1": call_syntaxes.DEEPSEEK,
        "deepseek_v3_1": call_syntaxes.DEEPSEEK,
        "kimi_k2": call_syntaxes.KIMI,
        "gpt_oss": Channels(),
    }
    assert found.calls == wanted[family]
    reasons = (family in THINKING and family != "gpt_oss") or family == "deepseek_v3_1"
    assert found.reasoning == ((BRACKET_THINK if family == "mistral_v11" else THINK) if reasons else None)


@pytest.mark.parametrize(
    "source, tokens, calls, reasoning",
    [
        ("{{ messages }}", ["<tool_call>", "<|im_end|>"], None, None),
        ("{{ messages }}", ["<think>", "</think>"], None, THINK),
        ("{{ messages }}", ["[TOOL_CALLS]"], call_syntaxes.MISTRAL, None),
        ("<tool_call>", ["[TOOL_CALLS]"], call_syntaxes.HERMES, None),
        ("<|python_tag|>", [], BareCalls(), None),
    ],
)
def test_the_vocabulary_says_what_the_template_does_not(source, tokens, calls, reasoning):
    found = find_format(source, tokens)
    assert (found and found.calls, found and found.reasoning) == (calls, reasoning)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_rendered_turn_is_read_back(family, render, count):
    count = min(count, 1) if family in ONE_CALL else count
    prompt, sampled = render(family, turn(family, count))
    found = find_format(FAMILIES[family], SPECIAL)
    assert found is not None
    events = [thought("Hm.\n\n  Well.")] if family in THINKING else []
    events += [said("Yes.")] if not count or family not in CALLS_OR_TEXT else []
    events += [WANTED] * count
    text = sampled.removesuffix("\n") if family.startswith("qwen") else sampled
    assert read(found, [text], prompt) == (events, "ok")
    for seed in range(300):
        assert read(found, cut(text, seed), prompt) == (events, "ok")


def test_a_call_without_arguments_is_read_back(family, render):
    prompt, sampled = render(family, turn(family, 1, arguments={}, name="now", content=""))
    found = find_format(FAMILIES[family], SPECIAL)
    assert found is not None
    events, status = read(found, list(sampled), prompt)
    assert (events[-1], status) == (("now", "{}"), "ok")


def test_an_answer_may_end_anywhere(family, render):
    """Whatever there is of it then stands in the events."""
    prompt, sampled = render(family, turn(family, 1))
    found = find_format(FAMILIES[family], SPECIAL)
    assert found is not None
    for length in range(len(sampled)):
        events, status = read(found, [sampled[:length]], prompt)
        assert read(found, cut(sampled[:length], length), prompt) == (events, status)
        if ("look", WANTED[1]) not in events:
            raw = "".join(text for _, text in events)
            assert without_marks(raw, found) == without_marks(sampled[:length], found)


def test_a_missing_letter_breaks_nothing_but_its_call(family, render):
    prompt, sampled = render(family, turn(family, 1))
    found = find_format(FAMILIES[family], SPECIAL)
    assert found is not None
    for place in range(len(sampled)):
        text = sampled[:place] + sampled[place + 1 :]
        events, status = read(found, [text], prompt)
        assert read(found, cut(text, place), prompt) == (events, status)
        written = [event for event in events if isinstance(event[0], str)]
        assert all(json.loads(arguments).keys() for _, arguments in written)
        if not written:
            raw = "".join(text for _, text in events)
            assert without_marks(raw, found) == without_marks(text, found)


def without_marks(text, format):
    """The text without blanks, and without the markers and headers that are layout where no call is read."""
    for marker in marks(format):
        text = text.replace(marker, "")
    return "".join(text.split())


def marks(format):
    calls = format.calls
    if isinstance(calls, CallSyntax):
        own = [calls.opener, *([calls.closer] if calls.closer else []), *calls.around]
    else:
        own = [calls.opener] if isinstance(calls, BareCalls) else [START, CHANNEL, MESSAGE, END, *HEADERS]
    return [*own, *(format.reasoning or ()), *format.ends]


PIECES = {
    "qwen2_5": ['{"name": "look", "arguments": {"n": 1}}', '{"name": '],
    "qwen3": ['{"name": "look", "arguments": {"n": 1}}', '{"name": '],
    "qwen3_5": ["<function=look>", "</function>", "<parameter=path>", "</parameter>"],
    "llama_3": ['{"name": "look", "parameters": {"n": 1}}', ";", "{", "}", '"', "\\"],
    "mistral_v3": ['[{"name": "look", "arguments": {"n": 1}}]', "["],
    "mistral_v11": ["look", "[ARGS]", '{"n": 1}'],
    "glm_4_5": ["look", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "glm_4_7": ["look", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
    "deepseek_r1": ["function", "<｜tool▁sep｜>", "look\n```json\n{}\n```"],
    "deepseek_v3_1": ["look", "<｜tool▁sep｜>", "{}"],
    "kimi_k2": ["functions.look:0", "<|tool_call_argument_begin|>", "{}"],
    "gpt_oss": ["analysis", "commentary", "final", " to=functions.look", "assistant", "json", "{}"],
}


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_no_answer_raises_and_no_word_is_lost(family, data):
    format = find_format(FAMILIES[family], SPECIAL)
    assert format is not None
    known = [*marks(format), *PIECES[family], " ", "\n", "WORD", "WORD"]
    pieces = data.draw(st.lists(st.sampled_from(known) | st.text(max_size=2), max_size=24))
    pieces = [f"w{n}w" if piece == "WORD" else piece for n, piece in enumerate(pieces)]
    prompt = data.draw(st.sampled_from(["", "<think>\n", "<|start|>assistant"]))
    found = read(format, pieces, prompt)
    assert read(format, list("".join(pieces)), prompt) == read(format, ["".join(pieces)], prompt) == found
    shown = "".join(first + second if isinstance(first, str) else second for first, second in found[0])
    assert [piece for piece in pieces if piece.startswith("w") and piece not in shown] == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [10, 1000])
def test_a_hundred_thousand_blanks_are_no_work(family, render, size):
    """Work that grows with the square would take hours."""
    prompt, sampled = render(family, turn(family, 1))
    found = find_format(FAMILIES[family], SPECIAL)
    assert found is not None
    for place in range(0, len(sampled), 1 + len(sampled) // (4 if size == 10 else 20)):
        pieces = [sampled[:place], *[" " * size] * (100_000 // size), sampled[place:]]
        events, _ = read(found, pieces, prompt)
        assert events
