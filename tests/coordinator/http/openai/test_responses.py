"""OpenAI's Responses: items, events and errors as its own client reads them."""

import asyncio
import json
import re

import httpx
import httpx2
import openai
import pytest

from spmd_tx.coordinator.http.openai.response_events import ResponseEvents
from spmd_tx.coordinator.http.text_generation import event_streams, sample_stream
from spmd_tx.coordinator.requests.records import Failed
from tests.coordinator.http.real_server import sqlite_only
from tests.coordinator.http.text_generation.drawing import TEMPLATE, answer_with_calls
from tests.coordinator.http.text_generation.drawing import drawing as drawing

BASE_MODEL = "Qwen/Qwen3-0.6B"
LOOK = {"type": "function", "name": "look", "description": "L", "parameters": {"type": "object"}}
SPACE = {"type": "namespace", "name": "f", "tools": [LOOK]}
ANSWER = answer_with_calls("f__look")
# Its tokens are kept, and the context is short.
BRIEFLY = """\
<think>I</think><tool_call>{"name": "look"}</tool_call><tool_call>{"name": "f__look"}</tool_call><|im_end|>"""

pytestmark = sqlite_only  # nothing depends on the database


@pytest.fixture
def oai(api, services):
    (services.bases.default.model.directory / "chat_template.jinja").write_text(TEMPLATE)
    api.base_url = httpx.URL("http://server/oai/api/v1/")
    return api


def asked(**more):
    return {"model": BASE_MODEL, "input": "hi", "store": False, "tools": [LOOK, SPACE]} | more


def events(text):
    """The contents of the events of a stream, whose names are their types."""
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        if event.startswith(":"):
            continue
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def unnamed(value):
    """A value without what differs from request to request."""
    if isinstance(value, dict):
        own = {"id", "call_id", "encrypted_content", "created_at"}
        return {key: unnamed(each) for key, each in value.items() if key not in own}
    return [unnamed(each) for each in value] if isinstance(value, list) else value


async def test_a_whole_answer_has_reasoning_a_message_and_calls(drawing, oai):
    answer = await drawing.answer(oai.post("responses", json=asked()), ANSWER, cached=5)
    body = answer.json()
    thought, said, *calls = body["output"]
    assert (body["status"], thought["summary"][0]["text"], said["content"][0]["text"]) == (
        "completed",
        "I look.",
        "Wait.",
    )
    assert [(each.get("namespace"), each["name"], each["arguments"]) for each in calls] == [
        (None, "look", '{"a":1}'),
        ("f", "look", "{}"),
    ]
    ids = [each["id"] for each in body["output"]] + [each["call_id"] for each in calls]
    assert len(set(ids)) == 6
    assert all(re.fullmatch("[A-Za-z0-9_]{1,40}", id) for id in ids)
    usage = body["usage"]
    assert usage["input_tokens_details"] == {"cached_tokens": 5}
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


@pytest.mark.parametrize("most", [1, 1000])
async def test_a_stream_adds_up_to_the_whole_answer(drawing, oai, monkeypatch, most):
    monkeypatch.setattr(sample_stream, "PIECE_COST", 16 * most)
    whole = (await drawing.answer(oai.post("responses", json=asked()), ANSWER)).json()
    answer = await drawing.answer(oai.post("responses", json=asked(stream=True)), ANSWER)
    streamed = events(answer.text)
    assert [each["type"] for each in streamed[:2]] == ["response.created", "response.in_progress"]
    assert unnamed(streamed[-1]["response"]) == unnamed(whole)

    transport = httpx2.MockTransport(
        lambda _: httpx2.Response(200, text=answer.text, headers={"content-type": "text/event-stream"})
    )
    with (
        openai.OpenAI(
            base_url="http://server", api_key="k", http_client=httpx2.Client(transport=transport)
        ) as client,
        client.responses.stream(model="m", input="hi") as stream,
    ):
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.output_text.delta", "response.reasoning_summary_text.delta"} <= kinds
    assert (final.output_text, [each.type for each in final.output]) == (
        "Wait.",
        ["reasoning", "message", "function_call", "function_call"],
    )


async def test_what_comes_back_of_an_answer_is_the_same_turn(drawing, oai, services):
    """Its tokens are those that were drawn, and results stand in the order of its calls."""
    answer = (await drawing.answer(oai.post("responses", json=asked()), BRIEFLY)).json()
    owner = services.keyring.caller(None).owner
    sealed = answer["output"][0]["encrypted_content"]
    assert services.turn_seals.open(owner, sealed) == f"{services.scheduler.arrived[0].id}:0"
    ids = [each["call_id"] for each in answer["output"] if each["type"] == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": id, "output": id[-3:]} for id in reversed(ids)]
    talk = [{"role": "user", "content": "hi"}, *answer["output"], *outputs]
    await drawing.answer(oai.post("responses", json=asked(input=talk)), "ok")
    prompt = await drawing.prompt()
    assert prompt.index(ids[0][-3:]) < prompt.index(ids[1][-3:])
    assert BRIEFLY.removesuffix("<|im_end|>") in prompt


async def test_a_cut_answer_is_incomplete(drawing, oai):
    for streamed in (False, True):
        answer = await drawing.answer(oai.post("responses", json=asked(stream=streamed)), "seen", "length")
        last = events(answer.text)[-1] if streamed else {"response": answer.json()}
        assert last["response"]["status"] == "incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        assert last.get("type") == ("response.incomplete" if streamed else None)


async def test_silence_is_filled_with_comments(drawing, oai, monkeypatch):
    monkeypatch.setattr(event_streams, "KEEP_ALIVE_SECONDS", -1.0)
    monkeypatch.setattr(sample_stream, "PIECE_COST", 16)
    answer = await drawing.answer(oai.post("responses", json=asked(stream=True)), ANSWER)
    assert ": still working\n\n" in answer.text
    assert events(answer.text)[-1]["type"] == "response.completed"


async def test_what_codex_sends_without_effect_is_taken(drawing, oai):
    harmless = {
        "reasoning": {"effort": "high", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {"thread": "t"},
        "text": {"verbosity": None},
        "tools": [LOOK, {"type": "web_search"}, {"type": "custom", "name": "patch"}],
        "parallel_tool_calls": False,
        "max_output_tokens": 100_000,
    }
    answer = (await drawing.answer(oai.post("responses", json=asked(**harmless)), ANSWER)).json()
    assert [each["type"] for each in answer["output"]] == ["reasoning", "message", "function_call"]


async def test_an_answer_is_gone_on_from_by_its_id(drawing, oai):
    """The prompt is that of the whole conversation, but for the instructions of the answers before."""
    first = asked(store=None, instructions="Be brief.")
    answer = (await drawing.answer(oai.post("responses", json=first), BRIEFLY)).json()
    assert (answer["store"], answer["previous_response_id"]) == (True, None)
    ids = [each["call_id"] for each in answer["output"] if each["type"] == "function_call"]
    outputs = [{"type": "function_call_output", "call_id": id, "output": id[-3:]} for id in ids]
    more = asked(store=None, input=outputs, previous_response_id=answer["id"])
    second = (await drawing.answer(oai.post("responses", json=more), "ok")).json()
    assert second["previous_response_id"] == answer["id"]
    prompt = await drawing.prompt()
    talk = [{"role": "user", "content": "hi"}, *answer["output"], *outputs]
    await drawing.answer(oai.post("responses", json=asked(input=talk)), "ok")
    assert await drawing.prompt() == prompt
    assert ids[0][-3:] in prompt
    assert "Be brief." not in prompt
    third = asked(store=None, input="and?", previous_response_id=second["id"], instructions="Be long.")
    await drawing.answer(oai.post("responses", json=third), "ok")
    prompt = await drawing.prompt()
    assert prompt.index("Be long.") < prompt.index(ids[0][-3:]) < prompt.index("and?")


async def test_only_answers_that_are_kept_and_the_callers_can_be_gone_on_from(drawing, oai, services):
    kept, not_kept = [
        (await drawing.answer(oai.post("responses", json=asked(store=store)), "ok")).json()["id"]
        for store in (True, False)
    ]
    owner = services.keyring.caller(None).owner
    turn = f"{kept.removeprefix('resp_')}:0"
    assert services.turn_memory.find(owner, turn) is not None
    assert services.turn_memory.find(owner[:-1], turn) is None
    for id in (not_kept, kept + "0", "x" * 1000):
        refused = await oai.post("responses", json=asked(previous_response_id=id))
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "previous_response_not_found")
        assert "send the whole conversation" in refused.json()["error"]["message"]
        assert len(refused.text) < 500


async def test_a_trajectory_keeps_answers_for_requests_that_name_them(drawing, api, services):
    (services.bases.default.model.directory / "chat_template.jinja").write_text(TEMPLATE)
    api.base_url = httpx.URL("http://server/oai/api/in/long/v1/")
    first = asked(instructions="Be brief.")
    answer = (await drawing.answer(api.post("responses", json=first), "yes<|im_end|>")).json()
    services.trajectories.trees.forget(next(iter(services.trajectories.trees._entries)))  # as at a start
    more = asked(input="and?", previous_response_id=answer["id"])
    await drawing.answer(api.post("responses", json=more), "ok")
    prompt = await drawing.prompt()
    assert "Be brief." not in prompt
    assert prompt.index("hi") < prompt.index("yes") < prompt.index("and?")
    api.base_url = httpx.URL("http://server/oai/api/in/other/v1/")
    assert (await api.post("responses", json=more)).status_code == 404


@pytest.mark.parametrize(
    "more, status, param",
    [
        ({"previous_response_id": "resp_1"}, 404, "previous_response_id"),
        ({"background": True}, 400, "background"),
        ({"text": {"format": {"type": "json_schema"}}}, 400, "text.format"),
        ({"text": {"tone": 1}}, 400, "text.tone"),
        ({"reasoning": {"depth": 1}}, 400, "reasoning.depth"),
        ({"reasoning": {"effort": {"high": 1}}}, 400, "reasoning.effort"),
        ({"input": [{"role": [], "content": "x"}]}, 400, "input[0]"),
        ({"tool_choice": "must"}, 400, "tool_choice"),
        ({"include": ["message.output_text.logprobs"]}, 400, "include"),
        ({"min_p": 0.1}, 400, "min_p"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            400,
            "input[0].content[0].image_url",
        ),
    ],
)
async def test_what_is_not_offered_is_refused_by_its_name(oai, more, status, param):
    answer = await oai.post("responses", json=asked(**more))
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert param in answer.json()["error"]["message"] or param == "previous_response_id"


async def test_a_prompt_that_is_too_long_has_the_code_that_clients_read(oai):
    answer = await oai.post("responses", json=asked(input="word " * 400))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_what_is_given_up_ends_the_stream_as_failed(oai, services):
    services.scheduler.is_paused = True
    answering = asyncio.create_task(oai.post("responses", json=asked(stream=True)))
    while not services.scheduler.arrived:
        await asyncio.sleep(0.01)
    services.queue.resolve(services.scheduler.arrived[0].id, Failed("it crashes the workers", "server"))
    last = events((await answering).text)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "it crashes the workers"}


async def test_a_fault_within_a_stream_ends_it_as_failed(drawing, oai, monkeypatch):
    def fail(*_):
        raise KeyError("unforeseen")

    monkeypatch.setattr(ResponseEvents, "piece", fail)
    answer = await drawing.answer(oai.post("responses", json=asked(stream=True)), "seen")
    assert events(answer.text)[-1]["response"]["error"]["code"] == "server_error"
