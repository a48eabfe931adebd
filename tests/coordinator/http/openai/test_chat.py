"""Agents' chats: tools, reasoning, and what of both is refused. A test writes what the model draws."""

import json
import re
from itertools import groupby

import httpx
import openai
import pytest

from spmd_tx.coordinator.http.openai.completion_events import CompletionEvents
from spmd_tx.coordinator.http.text_generation import event_streams
from tests.coordinator.http.openai.test_routes import BASE_MODEL, events
from tests.coordinator.http.text_generation.drawing import drawing as drawing
from tests.support import chat_templates as released
from tests.support.reply_templates import FAMILIES

LOOK = {"type": "function", "function": {"name": "look"}}
CALLS = """\
<tool_call>
{"name": "look", "arguments": {"a": 1}}
</tool_call>
<tool_call>
{"name": "look"}
</tool_call>"""
ANSWER = f"<think>\nI look.\n</think>\n\nWait.\n{CALLS}"
CALL = {"name": "look", "arguments": '{"a":1}'}


# The context is short.
TEMPLATE = FAMILIES["qwen3"].replace("tool | tojson", "tool.function.name ~ tool.function.description")


@pytest.fixture
def template():
    return TEMPLATE


@pytest.fixture
def oai(api, services, template):
    (services.bases.default.model.directory / "chat_template.jinja").write_text(template)
    api.base_url = httpx.URL("http://server/oai/api/v1/")
    return api


def chat(**more):
    return {"model": BASE_MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": [LOOK]} | more


@pytest.fixture
def draw(oai, drawing):
    """Ask, and let the model draw this text."""

    async def draw(text, stop_reason="stop", cached=0, **more):
        asking = oai.post("chat/completions", json=chat(**more))
        return await drawing.answer(asking, text, stop_reason, cached, more.get("n", 1))

    return draw


async def prompt(services, tokenizer):
    """The text of the latest prompt."""
    sample = json.loads(await services.queue.payload(services.scheduler.arrived[-1]))
    return tokenizer.decode(sample["prompt"]["chunks"][0]["tokens"], skip_special_tokens=False)


async def test_a_whole_answer_has_reasoning_content_and_calls(draw, tokenizer):
    answer = (await draw(f"{ANSWER}<|im_end|>", cached=5)).json()
    choice, usage = answer["choices"][0], answer["usage"]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"], choice["finish_reason"]) == (
        "I look.",
        "Wait.",
        "tool_calls",
    )
    assert [call["function"] for call in message["tool_calls"]] == [CALL, {"name": "look", "arguments": "{}"}]
    ids = [call["id"] for call in message["tool_calls"]]
    assert all(re.fullmatch("call_[A-Za-z0-9]{24}", id) for id in ids)
    assert len(set(ids)) == 2
    assert usage["prompt_tokens_details"] == {"cached_tokens": 5}
    reasoned = len(tokenizer.encode("<think>\nI look.").ids)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": reasoned}


async def test_content_is_null_beside_nothing_but_calls(draw):
    message = (await draw(CALLS)).json()["choices"][0]["message"]
    assert (message["content"], len(message["tool_calls"])) == (None, 2)
    assert "reasoning_content" not in message


@pytest.mark.parametrize("most", [1, 3, 1000])
async def test_a_stream_adds_up_to_the_whole_answer(draw, oai, monkeypatch, most):
    monkeypatch.setattr("spmd_tx.coordinator.http.text_generation.sample_stream.PIECE_COST", 16 * most)
    asked = {"n": 2, "logprobs": True, "return_token_ids": True}
    whole = (await draw(ANSWER, **asked)).json()
    streamed = events(await draw(ANSWER, stream=True, stream_options={"include_usage": True}, **asked))
    assert streamed[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert streamed[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [
            event["choices"][0] for event in streamed[:-1] if event["choices"][0]["index"] == choice["index"]
        ]
        deltas, message = [each["delta"] for each in mine], choice["message"]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(each.get("reasoning_content", "") for each in deltas) == message["reasoning_content"]
        assert "".join(each.get("content", "") for each in deltas) == message["content"]
        logprobs = [entry for each in mine[1:] for entry in each["logprobs"]["content"]]
        assert logprobs == choice["logprobs"]["content"]
        assert [token for each in mine[1:] for token in each["token_ids"]] == choice["token_ids"]
        assert [each["finish_reason"] for each in mine] == [None] * (len(mine) - 1) + ["tool_calls"]
        says = [next(iter(each), None) for each in deltas[1:-1]]
        kinds = [kind for kind, _ in groupby(filter(None, says))]
        assert (kinds, deltas[-1]) == (["reasoning_content", "content", "tool_calls"], {})


async def test_each_call_of_a_stream_is_an_event_that_names_it_and_one_with_its_arguments(draw):
    deltas = [event["choices"][0]["delta"] for event in events(await draw(CALLS, stream=True))]
    calls = [each for delta in deltas for each in delta.get("tool_calls", [])]
    assert [each["index"] for each in calls] == [0, 0, 1, 1]
    assert calls[0]["function"] == {"name": "look", "arguments": ""}
    assert (calls[0]["type"], set(calls[1])) == ("function", {"index", "function"})
    assert [each["function"]["arguments"] for each in calls[1::2]] == ['{"a":1}', "{}"]


async def test_openais_client_reads_both_alike(draw, oai, services):
    whole = (await draw(ANSWER)).json()["choices"][0]["message"]
    text = (await draw(ANSWER, stream=True)).text

    def play(request):
        return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})

    http_client = httpx.Client(transport=httpx.MockTransport(play))
    with (
        openai.OpenAI(base_url="http://server/v1", api_key="x", http_client=http_client) as client,
        client.chat.completions.stream(model=BASE_MODEL, messages=[]) as stream,
    ):
        message = stream.get_final_completion().choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == (whole["content"], "I look.")
    assert [call.function.name for call in message.tool_calls] == ["look", "look"]
    assert [call.function.arguments for call in message.tool_calls] == ['{"a":1}', "{}"]


async def test_only_the_first_call_is_kept_where_they_must_not_be_parallel(draw):
    choice = (await draw(ANSWER, parallel_tool_calls=False)).json()["choices"][0]
    assert [call["function"] for call in choice["message"]["tool_calls"]] == [CALL]


async def test_an_answer_that_is_cut_says_so_and_half_a_call_is_content(draw):
    choice = (await draw(ANSWER.removesuffix("</tool_call>"), "length")).json()["choices"][0]
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("length", 1)
    assert choice["message"]["content"].endswith('<tool_call>\n{"name": "look"}\n')


async def test_tools_are_neither_shown_nor_called_if_none_may_be(draw, services, tokenizer):
    choice = (await draw(CALLS, tool_choice="none")).json()["choices"][0]
    assert "look" not in await prompt(services, tokenizer)
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALLS, "stop")


SHORTER = """\
{% for tool in tools or [] %}{{ tool.function.name ~ tool.function.description }}{% endfor %}
{% for m in messages %}{{ m.role[0] ~ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{% endfor %}"""


@pytest.mark.parametrize("template", [SHORTER])
async def test_a_result_comes_back_to_the_model(draw, services, tokenizer):
    message = (await draw(CALLS)).json()["choices"][0]["message"]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"r{place}"}
        for place, call in enumerate(message["tool_calls"])
    ]
    messages = [{"role": "user", "content": "hi"}, message, *reversed(results)]
    answer = (await draw("seen", messages=messages)).json()["choices"][0]
    text = await prompt(services, tokenizer)
    assert text.index('{"a": 1}') < text.index("r0") < text.index("r1")
    assert (answer["message"]["content"], answer["finish_reason"]) == ("seen", "stop")


async def test_tokens_of_prompt_and_answer_are_given_on_request(draw, services, tokenizer):
    answer = (await draw("seen", return_token_ids=True)).json()
    shown = tokenizer.decode(answer["prompt_token_ids"], skip_special_tokens=False)
    assert shown == await prompt(services, tokenizer)
    assert answer["choices"][0]["token_ids"] == tokenizer.encode("seen").ids
    assert "prompt_token_ids" not in (await draw("seen")).json()


async def test_more_tokens_than_there_is_room_for_are_as_many_as_there_is_room_for(draw, services):
    tokens = len((await draw("x", return_token_ids=True)).json()["prompt_token_ids"])
    for name in ("max_tokens", "max_completion_tokens"):
        await draw("x", **{name: 10**6})
        sample = json.loads(await services.queue.payload(services.scheduler.arrived[-1]))
        assert sample["sampling_params"]["max_tokens"] == services.bases.default.limits.max_context - tokens


@pytest.mark.parametrize("length", [600, 60_000], ids=["by its tokens", "by its bytes"])
async def test_a_conversation_without_room_for_an_answer_is_refused_in_the_words_of_both(oai, length):
    refused = await oai.post(
        "chat/completions", json=chat(messages=[{"role": "user", "content": "9" * length}])
    )
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded")
    if length == 600:
        assert re.search(r"prompt is too long: [0-9]+ tokens > 127 maximum", error["message"])


async def test_a_call_that_takes_long_to_write_gets_signs_of_life(draw, monkeypatch):
    monkeypatch.setattr(event_streams, "KEEP_ALIVE_SECONDS", -1.0)
    monkeypatch.setattr("spmd_tx.coordinator.http.text_generation.sample_stream.PIECE_COST", 16)
    assert ": still working\n\n" in (await draw(CALLS, stream=True)).text


async def test_a_stream_that_fails_unforeseen_says_so_in_an_event(draw, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("nobody has seen this coming")

    monkeypatch.setattr(CompletionEvents, "piece", fail)
    error = events(await draw("seen", stream=True))[-1]["error"]
    assert (error["type"], "internal error" in error["message"]) == ("server_error", True)


REFUSED = [
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0]"),
    ({"tools": [LOOK, {"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "tools[1]"),
    ({"tools": LOOK}, "tools"),
    ({"tool_choice": "required", "tools": []}, "tool_choice"),
    ({"tool_choice": "must"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "wait"}}}, "tool_choice"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"grammar": "start: A", "tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"min_p": 0.5}, "min_p"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
    ({"functions": [{"name": "f"}]}, "functions"),
]


async def test_what_is_not_offered_is_refused_by_name(oai):
    for more, param in REFUSED:
        refused = await oai.post("chat/completions", json=chat(**more))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "more, said",
    [
        ({"chat_template_kwargs": {"tools": [LOOK]}}, "tools is given twice"),
        ({"tools": [{"type": "function", "function": {"name": "x" * (1 << 20)}}]}, "the limit tools_bytes"),
    ],
)
async def test_tools_are_sent_once_and_are_not_too_large(oai, more, said):
    refused = await oai.post("chat/completions", json=chat(**more))
    assert (refused.status_code, said in refused.json()["error"]["message"]) == (400, True)


@pytest.mark.parametrize("template", [released.PLAIN, TEMPLATE.replace("<tool_call>", "<other>")])
async def test_tools_are_refused_for_a_model_whose_calls_are_not_known(oai):
    error = (await oai.post("chat/completions", json=chat())).json()["error"]
    assert (error["param"], "chat_template_kwargs.tools" in error["message"]) == ("tools", True)


@pytest.mark.parametrize("template", [released.QWEN3])
async def test_reasoning_is_switched_off_where_a_template_can(draw, oai, services, tokenizer):
    answer = await draw(
        "seen", tools=None, reasoning_effort="none", messages=[{"role": "user", "content": "hi"}]
    )
    assert (await prompt(services, tokenizer)).endswith("<think>\n\n</think>\n\n")
    assert answer.json()["choices"][0]["message"]["content"] == "seen"
    error = (await oai.post("chat/completions", json=chat(reasoning_effort="low"))).json()["error"]
    assert (error["param"], "or send none" in error["message"]) == ("reasoning_effort", True)


@pytest.mark.parametrize("template", [released.QWEN3.replace("enable_thinking", "reasoning_effort")])
async def test_effort_is_a_variable_of_the_template_if_it_has_one(draw):
    assert (await draw("seen", tools=None, reasoning_effort="low")).status_code == 200


@pytest.mark.parametrize("template", [FAMILIES["qwen3_5"]])
async def test_reasoning_may_begin_in_the_prompt(draw):
    message = (await draw("I look.\n</think>\n\nSeen", tools=None)).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("I look.", "Seen")
