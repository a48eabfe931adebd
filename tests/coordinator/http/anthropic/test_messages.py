"""Anthropic's Messages: blocks, events and errors as its own client reads them."""

import json
import re

import anthropic
import httpx
import httpx2
import pytest

from spmd_tx.coordinator.http.anthropic.blocks import MessageEvents
from spmd_tx.coordinator.http.text_generation import event_streams, sample_stream
from spmd_tx.coordinator.requests.records import Failed
from spmd_tx.errors import TooManyRequests, Unavailable
from tests.coordinator.http.real_server import sqlite_only
from tests.coordinator.http.text_generation.drawing import TEMPLATE, answer_with_calls
from tests.coordinator.http.text_generation.drawing import drawing as drawing

BASE_MODEL = "Qwen/Qwen3-0.6B"
LOOK = {"name": "look", "description": "L", "input_schema": {"type": "object"}}
ANSWER = answer_with_calls("look")
# Its tokens are kept, and the context is short.
BRIEFLY = """\
<think>I</think><tool_call>{"name": "look"}</tool_call><tool_call>{"name": "look"}</tool_call><|im_end|>"""

pytestmark = sqlite_only  # nothing depends on the database


@pytest.fixture
def anthropic_api(api, services):
    (services.bases.default.model.directory / "chat_template.jinja").write_text(TEMPLATE)
    api.base_url = httpx.URL("http://server/anthropic/api/v1/")
    return api


def asked(**more):
    return {
        "model": BASE_MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 128_000,
        "tools": [LOOK],
    } | more


def events(text):
    """The names and contents of the events of a stream."""
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        found.append(content)
    return found


def read_by_client(text, call):
    """What the real client makes of an answer."""
    media = "text/event-stream" if text.startswith("event: ") else "application/json"
    transport = httpx2.MockTransport(
        lambda _: httpx2.Response(200, text=text, headers={"content-type": media})
    )
    with anthropic.Anthropic(
        base_url="http://server", api_key="k", http_client=httpx2.Client(transport=transport)
    ) as client:
        return call(client)


async def test_a_whole_answer_has_thinking_text_and_calls(drawing, anthropic_api):
    answer = await drawing.answer(anthropic_api.post("messages", json=asked()), ANSWER, cached=5)
    message = read_by_client(
        answer.text, lambda client: client.messages.create(model="m", max_tokens=1, messages=[])
    )
    thinking, text, *uses = message.content
    assert (thinking.thinking, text.text, message.stop_reason) == ("I look.", "Wait.", "tool_use")
    assert re.fullmatch("[A-Za-z0-9_-]+", thinking.signature)
    assert [(use.name, use.input) for use in uses] == [("look", {"a": 1}), ("look", {})]
    assert all(re.fullmatch("toolu_[A-Za-z0-9]{24}", use.id) for use in uses)
    usage, prompt = message.usage, (await drawing.request())["prompt"]["chunks"][0]["tokens"]
    assert (usage.input_tokens + 5, usage.cache_read_input_tokens) == (len(prompt), 5)


@pytest.mark.parametrize("most", [1, 1000])
async def test_a_stream_adds_up_to_the_whole_answer(drawing, anthropic_api, monkeypatch, most):
    monkeypatch.setattr(sample_stream, "PIECE_COST", 16 * most)
    whole = (await drawing.answer(anthropic_api.post("messages", json=asked()), ANSWER, cached=5)).json()
    answer = await drawing.answer(anthropic_api.post("messages", json=asked(stream=True)), ANSWER, cached=5)
    assert [each["type"] for each in (events(answer.text)[0], *events(answer.text)[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert events(answer.text)[0]["message"]["usage"]["cache_read_input_tokens"] == 5

    def stream(client):
        with client.messages.stream(model="m", max_tokens=1, messages=[]) as streamed:
            return streamed.get_final_message()

    final = read_by_client(answer.text, stream).model_dump()
    own = {"id", "signature"}
    for streamed, expected in zip(final["content"], whole["content"], strict=True):
        assert {key: streamed[key] for key in expected if key not in own} == {
            key: value for key, value in expected.items() if key not in own
        }
    for key in ("stop_reason", "stop_sequence", "role", "model"):
        assert final[key] == whole[key]
    for key, count in whole["usage"].items():
        assert final["usage"][key] == count


async def test_what_comes_back_of_an_answer_is_the_same_turn(drawing, anthropic_api, services):
    """Its signature names it, its tokens are those that were drawn, and results name its calls."""
    answer = (await drawing.answer(anthropic_api.post("messages", json=asked()), BRIEFLY)).json()
    signature = answer["content"][0]["signature"]
    owner = services.keyring.caller(None).owner
    assert services.turn_seals.open(owner, signature) == f"{services.scheduler.arrived[0].id}:0"
    uses = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": id, "content": id[-3:]} for id in reversed(uses)]
    talk = [
        *asked()["messages"],
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": results},
    ]
    await drawing.answer(anthropic_api.post("messages", json=asked(messages=talk)), "ok")
    prompt = await drawing.prompt()
    assert prompt.index(uses[0][-3:]) < prompt.index(uses[1][-3:])
    assert BRIEFLY.removesuffix("<|im_end|>") in prompt


@pytest.mark.parametrize(
    "drawn, ended, more, expected",
    [
        ("seen", "stop", {}, ("end_turn", None)),
        ("seen", "length", {}, ("max_tokens", None)),
        ("see this", "stop", {"stop_sequences": ["zz", " this"]}, ("stop_sequence", " this")),
    ],
)
async def test_it_says_why_it_has_stopped(drawing, anthropic_api, drawn, ended, more, expected):
    answer = await drawing.answer(anthropic_api.post("messages", json=asked(**more)), drawn, ended)
    assert (answer.json()["stop_reason"], answer.json()["stop_sequence"]) == expected


async def test_tokens_are_counted_as_they_are_read(drawing, anthropic_api):
    await drawing.answer(anthropic_api.post("messages", json=asked()), "ok")
    sample = await drawing.request()
    counting = {key: value for key, value in asked().items() if key != "max_tokens"}
    answer = await anthropic_api.post("messages/count_tokens", json=counting)
    read = len(sample["prompt"]["chunks"][0]["tokens"])
    assert answer.json() == {"input_tokens": read}
    assert 0 < sample["sampling_params"]["max_tokens"] < 128_000  # no more than there is room for


async def test_models_are_listed(anthropic_api):
    listed = (await anthropic_api.get("models")).json()
    assert listed["data"][0] | {"created_at": ""} == {
        "type": "model",
        "id": BASE_MODEL,
        "display_name": BASE_MODEL,
        "created_at": "",
    }
    assert (await anthropic_api.get(f"models/{BASE_MODEL}")).json() == listed["data"][0]


async def test_silence_is_filled_with_pings(drawing, anthropic_api, monkeypatch):
    monkeypatch.setattr(event_streams, "KEEP_ALIVE_SECONDS", -1.0)
    monkeypatch.setattr(sample_stream, "PIECE_COST", 16)
    answer = await drawing.answer(anthropic_api.post("messages", json=asked(stream=True)), ANSWER)
    kinds = [event["type"] for event in events(answer.text)]
    assert (kinds[0], "ping" in kinds) == ("message_start", True)


@pytest.mark.parametrize(
    "switch, kind, expected",
    [
        ("enable_thinking", "disabled", "off"),
        ("enable_thinking", "enabled", "on"),
        ("enable_thinking", "adaptive", "free"),
        ("other", "disabled", "free"),
    ],
)
async def test_thinking_is_the_switch_of_the_template(
    drawing, anthropic_api, services, switch, kind, expected
):
    template = (
        "{{ messages[0].content }} {% if X is defined %}{{ 'on' if X else 'off' }}{% else %}free{% endif %}"
    )
    path = services.bases.default.model.directory / "chat_template.jinja"
    path.write_text(template.replace("X", switch))
    asking = anthropic_api.post("messages", json=asked(tools=[], thinking={"type": kind, "budget_tokens": 9}))
    await drawing.answer(asking, "ok")
    assert (await drawing.prompt()).endswith(expected)


async def test_fields_without_effect_are_taken(drawing, anthropic_api):
    harmless = {
        "metadata": {"user_id": "u"},
        "context_management": {"edits": []},
        "service_tier": "auto",
        "output_config": {"effort": "high"},
        "container": None,
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }
    headers = {"anthropic-version": "2026-10-21", "anthropic-beta": "x-2030-01-01", "x-api-key": "tml-x"}
    asking = anthropic_api.post("messages?beta=true", json=asked(**harmless), headers=headers)
    message = (await drawing.answer(asking, ANSWER)).json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]


@pytest.mark.parametrize(
    "more, named",
    [
        ({"tool_choice": {"type": "any"}, "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "often"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "auto", "often": 1}}, "tool_choice.often"),
        ({"thinking": {"type": "hard"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "depth": 1}}, "thinking.depth"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format"),
        ({"output_config": {"effort": {"high": 1}}}, "output_config.effort"),
        ({"service_tier": "fast"}, "service_tier"),
        ({"container": "c"}, "container"),
        ({"min_p": 0.1}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    ],
)
async def test_what_is_not_offered_is_refused_by_its_name(anthropic_api, more, named):
    answer = await anthropic_api.post("messages", json=asked(**more))
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["type"]) == (
        400,
        "error",
        "invalid_request_error",
    )
    assert named in body["error"]["message"]


async def test_a_prompt_that_is_too_long_says_so_in_the_words_that_clients_read(anthropic_api, services):
    talk = [{"role": "user", "content": "word " * 400}]
    answer = await anthropic_api.post("messages", json=asked(messages=talk))
    found = re.search(r"prompt is too long: (\d+) tokens > (\d+) maximum", answer.json()["error"]["message"])
    assert found, answer.text
    assert int(found[1]) > int(found[2]) == services.bases.default.model.max_context - 1


async def test_errors_have_its_form_also_where_there_is_no_route(anthropic_api):
    for method, path, status in (
        ("GET", "http://server/anthropic", 404),
        ("POST", "complete", 404),
        ("GET", "messages", 405),
        ("GET", "models/gpt-5", 404),
    ):
        answer = await anthropic_api.request(method, path)
        assert (answer.status_code, answer.json()["type"]) == (status, "error")
    assert answer.json()["error"]["type"] == "not_found_error"
    assert (await anthropic_api.head("http://server/anthropic/api/hello")).status_code == 404


@pytest.mark.parametrize(
    "error, status, kind",
    [
        (TooManyRequests("too many", 7), 429, "rate_limit_error"),
        (Unavailable("down"), 529, "overloaded_error"),
    ],
)
async def test_what_passes_has_the_status_at_which_clients_wait(
    anthropic_api, services, monkeypatch, error, status, kind
):
    async def fail(*_):
        raise error

    monkeypatch.setattr(services.quotas, "_check_backlog", fail)
    answer = await anthropic_api.post("messages", json=asked())
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert answer.headers.get("retry-after") == ("7" if status == 429 else None)


@pytest.mark.parametrize("streamed", [False, True])
async def test_what_is_given_up_is_an_error_that_clients_do_not_retry(anthropic_api, services, streamed):
    services.scheduler.is_paused = True
    answer = await fail_sample(services, anthropic_api, Failed("it crashes the workers", "server"), streamed)
    if streamed:
        body = events(answer.text)[-1]
    else:
        body = answer.json()
        assert (answer.status_code, answer.headers["x-should-retry"]) == (500, "false")
    assert body == {"type": "error", "error": {"type": "api_error", "message": "it crashes the workers"}}


async def fail_sample(services, api, outcome, streamed):
    import asyncio

    answering = asyncio.create_task(api.post("messages", json=asked(stream=streamed)))
    while not services.scheduler.arrived:
        await asyncio.sleep(0.01)
    services.queue.resolve(services.scheduler.arrived[0].id, outcome)
    return await answering


async def test_a_fault_within_a_stream_ends_it_with_an_error(drawing, anthropic_api, monkeypatch):
    def fail(*_):
        raise KeyError("unforeseen")

    monkeypatch.setattr(MessageEvents, "piece", fail)
    answer = await drawing.answer(anthropic_api.post("messages", json=asked(stream=True)), "seen")
    assert events(answer.text)[-1]["error"]["type"] == "api_error"


async def test_keys_come_in_either_header(client_for, services):
    client = await client_for("alice")
    key = client.headers["x-api-key"]
    for headers in ({"x-api-key": key}, {"x-api-key": "", "authorization": f"Bearer {key}"}):
        sent = {name: value for name, value in headers.items() if value}
        client.headers.pop("x-api-key", None)
        answer = await client.get("http://server/anthropic/api/v1/models", headers=sent)
        assert answer.status_code == 200, answer.text
    answer = await client.get("http://server/anthropic/api/v1/models", headers={"x-api-key": "tml-wrong"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
