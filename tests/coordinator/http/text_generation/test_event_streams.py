"""A stream that cannot go on ends with an error of its dialect: clients take cut texts for whole ones."""

import asyncio
import json

import httpx
import pytest

from spmd_tx.coordinator.http.text_generation import sample_stream
from spmd_tx.coordinator.requests.records import Failed
from tests.coordinator.http.real_server import sqlite_only

pytestmark = sqlite_only  # nothing depends on the database

BASE_MODEL = "Qwen/Qwen3-0.6B"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def of_chat(text):
    *_, last, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    error = json.loads(last.removeprefix("data: "))["error"]
    return error["type"], error["message"]


def of_messages(text):
    *_, last, end = text.split("\n\n")
    name, data = last.split("\n")
    body = json.loads(data.removeprefix("data: "))
    assert (name, body["type"], end) == ("event: error", "error", "")
    return body["error"]["type"], body["error"]["message"]


def of_responses(text):
    *_, last, end = text.split("\n\n")
    name, data = last.split("\n")
    body = json.loads(data.removeprefix("data: "))
    assert (name, body["response"]["status"], end) == ("event: response.failed", "failed", "")
    return body["response"]["error"]["code"], body["response"]["error"]["message"]


DIALECTS = {
    "chat": (
        "oai/api/v1/chat/completions",
        CHAT,
        of_chat,
        ("server_error", "server_error", "invalid_request_error"),
    ),
    "messages": (
        "anthropic/api/v1/messages",
        CHAT,
        of_messages,
        ("overloaded_error", "api_error", "invalid_request_error"),
    ),
    "responses": (
        "oai/api/v1/responses",
        {"input": "hi"},
        of_responses,
        ("server_is_overloaded", "server_error", "invalid_prompt"),
    ),
}


@pytest.fixture(params=DIALECTS)
async def streaming(request, api, services):
    """A stream under way, how its last event is read, and what its errors are called."""
    path, body, last, kinds = DIALECTS[request.param]
    services.scheduler.is_paused = True
    asked = {"model": BASE_MODEL, "stream": True, **body}
    answering = asyncio.create_task(api.post(str(httpx.URL("http://server/").join(path)), json=asked))
    while not services.scheduler.arrived:
        assert not answering.done(), answering.result().text
        await asyncio.sleep(0.01)
    return answering, last, kinds


async def test_a_server_that_shuts_down_says_so(streaming, services):
    answering, last, (passing, _, _) = streaming
    services.health.closing.set_result(None)
    kind, message = last((await answering).text)
    assert (kind, message) == (passing, sample_stream.ENDING)


async def test_a_request_that_is_given_up_says_why(streaming, services):
    answering, last, (_, permanent, _) = streaming
    problem = "the workers ended twice while they ran this request"
    services.queue.resolve(services.scheduler.arrived[0].id, Failed(problem, "server"))
    assert last((await answering).text) == (permanent, problem)


async def test_a_request_that_cannot_be_drawn_says_why(streaming, services):
    answering, last, (_, _, refused) = streaming
    services.queue.resolve(services.scheduler.arrived[0].id, Failed("the weights are gone", "user"))
    assert last((await answering).text) == (refused, "the weights are gone")
