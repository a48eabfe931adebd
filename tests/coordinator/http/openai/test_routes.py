import asyncio
import json
from types import SimpleNamespace

import httpx
import msgspec
import numpy as np
import pytest

from spmd_tx.coordinator.http.text_generation import sample_stream, writing
from spmd_tx.coordinator.requests.records import Failed, Finished
from spmd_tx.coordinator.wire.sampling_protobuf import (
    SampledSequence,
    TopLogprobs,
    encode_sample_response,
)
from spmd_tx.coordinator.wire.training_protobuf import PROTOBUF
from tests.coordinator.http.fake_scheduler import DRAWN_TOKEN, LOGPROB

BASE_MODEL = "Qwen/Qwen3-0.6B"


@pytest.fixture
def oai(api):
    api.base_url = httpx.URL("http://server/oai/api/v1/")
    return api


def completion(**changes):
    return {"model": BASE_MODEL, "prompt": [1, 2, 3], "max_tokens": 4} | changes


def events(response):
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: ")]


class SampleByHand:
    """A sample of several characters that the test draws byte by byte."""

    def __init__(self, services, oai, tokenizer):
        self.services = services
        services.scheduler.is_paused = True
        self.tokens = tokenizer.encode("añ😀z").ids
        body = completion(stream=True, max_tokens=len(self.tokens))
        self.answering = asyncio.create_task(oai.post("completions", json=body))

    async def request_id(self):
        while not self.services.scheduler.arrived:
            await asyncio.sleep(0.01)
        return self.services.scheduler.arrived[0].id

    async def draw(self, count):
        """Give the sample this many tokens, and wait until the stream has seen them."""
        job = SimpleNamespace(request_id=await self.request_id())
        watches = self.services.progress._watches
        while job.request_id not in watches:
            await asyncio.sleep(0.001)
        tokens, logprobs = self.tokens[:count], [LOGPROB] * count
        sample = SimpleNamespace(
            job=job,
            index=0,
            tokens=tokens,
            logprobs=logprobs,
            top_of=lambda *_: None,
            stop_reason=None,
            forced=(),
        )
        self.services.progress.hear(sample)
        while watches[job.request_id].changed.is_set():
            await asyncio.sleep(0.001)

    async def end(self):
        sequence = SampledSequence(self.tokens, [LOGPROB] * len(self.tokens), "length")
        outcome = Finished(PROTOBUF, encode_sample_response([sequence]))
        self.services.queue.resolve(await self.request_id(), outcome)
        return events(await self.answering)


WIDTH, LONG = 120, 100


def wide():
    """A long sample with many likeliest tokens in each place."""
    tokens = np.tile(np.arange(WIDTH, dtype=np.int32), (LONG, 1))
    top = TopLogprobs(tokens, np.zeros((LONG, WIDTH), np.float32))
    return SampledSequence([DRAWN_TOKEN] * LONG, [LOGPROB] * LONG, "length", top)


async def answer_wide(services, oai, samples, **more):
    """Ask for likeliest tokens, and answer with these samples."""
    services.scheduler.is_paused = True
    first = len(services.scheduler.arrived)
    body = completion(n=len(samples), max_tokens=len(samples[0].tokens), logprobs=WIDTH, **more)
    answering = asyncio.create_task(oai.post("completions", json=body))
    while len(services.scheduler.arrived) == first:
        assert not answering.done(), answering.result().text
        await asyncio.sleep(0.01)
    outcome = Finished(PROTOBUF, encode_sample_response(samples))
    services.queue.resolve(services.scheduler.arrived[first].id, outcome)
    return answering


@pytest.fixture
async def drawn(services, oai, tokenizer):
    return SampleByHand(services, oai, tokenizer)


def texts(events):
    return [event["choices"][0]["text"] for event in events]


async def test_a_stream_has_no_half_characters(drawn):
    for count in range(1, len(drawn.tokens)):
        await drawn.draw(count)
    pieces = texts(await drawn.end())  # how many there are depends on how often the stream looks
    assert "".join(pieces) == "añ😀z"
    assert "\ufffd" not in "".join(pieces)


async def test_what_was_told_is_not_told_again_when_a_sample_begins_once_more(drawn):
    for count in (3, 1, 2, 7):
        await drawn.draw(count)
    assert "".join(texts(await drawn.end())) == "añ😀z"


async def test_a_stream_without_any_progress_is_the_result(drawn):
    told = await drawn.end()
    assert [(each["choices"][0]["text"], each["choices"][0]["finish_reason"]) for each in told] == [
        ("añ😀z", "length")
    ]


async def test_a_client_that_waits_long_gets_signs_of_life(drawn, monkeypatch):
    monkeypatch.setattr(sample_stream, "KEEP_ALIVE_SECONDS", 0.01)
    await drawn.draw(1)
    await asyncio.sleep(0.1)
    await drawn.end()
    assert ": still working\n\n" in (await drawn.answering).text


async def test_a_stream_that_fails_says_so_in_an_event(drawn):
    await drawn.draw(1)
    failed = Failed("the workers were lost 2 times", "server")
    drawn.services.queue.resolve(await drawn.request_id(), failed)
    first, last = events(await drawn.answering)
    assert first["choices"][0]["text"] == "a"
    assert last["error"]["message"] == "the workers were lost 2 times"
    assert last["error"]["type"] == "server_error"


async def test_a_server_that_ends_cancels_streams_and_says_so(drawn):
    await drawn.draw(1)
    drawn.services.health.closing.set_result(None)
    assert "shutting down" in events(await drawn.answering)[-1]["error"]["message"]
    assert drawn.services.scheduler.cancelled == [await drawn.request_id()]


@pytest.mark.parametrize(
    "failed, status, retries",
    [(Failed("no room", "user"), 400, None), (Failed("the workers were lost", "server"), 500, "false")],
)
async def test_a_failed_sample_has_a_status(services, oai, failed, status, retries):
    services.scheduler.is_paused = True
    answering = asyncio.create_task(oai.post("completions", json=completion()))
    while not services.scheduler.arrived:
        await asyncio.sleep(0.01)
    services.queue.resolve(services.scheduler.arrived[0].id, failed)
    response = await answering
    assert response.status_code == status
    assert response.json()["error"]["message"] == failed.error
    assert response.headers.get("x-should-retry") == retries


async def test_a_prompt_is_an_ordinary_sample_of_an_implicit_session(services, oai, tokenizer):
    response = await oai.post("completions", json=completion(prompt=["a", "b"], n=3))
    assert response.json()["choices"][5]["text"] == tokenizer.decode([DRAWN_TOKEN] * 4)
    first, second = services.scheduler.arrived
    assert (first.kind, second.kind) == ("sample", "sample")
    assert (first.line, first.session_id) == (second.line, second.session_id)
    assert (await services.catalog.session(first.session_id)).tags == ["openai"]
    payload = json.loads(await services.queue.payload(first))
    assert (payload["num_samples"], payload["sampling_session_id"]) == (3, first.line)


async def test_the_end_of_the_text_stops_as_well_as_stop_strings(services, oai):
    for stop in (None, "x", ["x", "y"]):
        await oai.post("completions", json=completion(stop=stop))
    payloads = [json.loads(await services.queue.payload(each)) for each in services.scheduler.arrived]
    assert [each["sampling_params"]["stop"] for each in payloads] == [None, ["x", 0], ["x", "y", 0]]


async def test_a_server_that_takes_no_work_says_so_in_openais_shape(services, oai):
    services.health.refusal = "shutting down"
    response = await oai.post("chat/completions", json={"model": BASE_MODEL, "messages": [{"role": "user"}]})
    assert response.status_code == 503
    assert response.json()["error"]["type"] == "server_error"


async def test_json_that_does_not_fit_names_the_place(oai):
    response = await oai.post("completions", json=completion(n="many"))
    assert response.status_code == 400
    assert "n: " in response.json()["error"]["message"]


async def test_the_models_are_the_base_model_and_what_was_saved_for_sampling(services, oai):
    (model,) = (await oai.get("models")).json()["data"]
    assert (model["id"], model["object"]) == (BASE_MODEL, "model")


async def test_stop_strings_are_as_long_as_everywhere(oai):
    refused = await oai.post("completions", json=completion(stop=["x" * 1025]))
    assert (refused.status_code, "at most 1024" in refused.text) == (400, True)
    assert (await oai.post("completions", json=completion(stop=["x" * 1024]))).status_code == 200


@pytest.mark.parametrize("prompt", ["x" * (1 << 20), ["a", "x" * (1 << 20)]], ids=["one", "of several"])
async def test_a_text_that_cannot_fit_is_refused_by_its_bytes(services, oai, prompt):
    refused = await oai.post("completions", json=completion(prompt=prompt))
    assert (refused.status_code, "it has 1048576 bytes" in refused.text) == (400, True)
    assert services.scheduler.arrived == []


async def test_a_conversation_that_cannot_fit_is_refused(services, oai):
    body = {"model": BASE_MODEL, "messages": [{"role": "user", "content": "x" * (5 << 20)}]}
    refused = await oai.post("chat/completions", json=body)
    assert (refused.status_code, "more than 4.0 MiB" in refused.text) == (400, True)


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_wide_answer_has_all_of_its_tokens(services, oai, streamed, monkeypatch):
    monkeypatch.setattr(writing, "SHORT_BYTES", 64 << 10)
    response = await (await answer_wide(services, oai, [wide(), wide()], stream=streamed))
    choices = [each["choices"][0] for each in events(response)] if streamed else response.json()["choices"]
    for index in (0, 1):
        mine = [choice["logprobs"] for choice in choices if choice["index"] == index]
        assert sum(len(each["tokens"]) for each in mine) == LONG
        assert sum(len(each["top_logprobs"]) for each in mine) == LONG
    assert len(choices) > 2 if streamed else len(choices) == 2
    assert "content-length" not in response.headers  # it was sent as it was written
    answers = services.body_rooms.answers
    assert answers.free == answers.capacity


async def test_a_wide_answer_waits_until_others_are_sent(services, oai):
    room = services.body_rooms.answers
    taken = [room.place(owner, room.capacity, lambda: None) for owner in ("a", "b")]  # half of it each
    for place in taken:
        await room.take(place, room.capacity)
    answering = await answer_wide(services, oai, [wide()])
    narrow = await oai.get("models")
    assert (narrow.status_code, answering.done()) == (200, False)
    for place in taken:
        room.leave(place)
    assert len((await answering).json()["choices"]) == 1


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_wide_answer_that_gets_no_room_is_to_be_asked_for_again(services, oai, streamed):
    bounds = msgspec.structs.replace(services.config.bounds, body_room_seconds=0.05)
    services.config = msgspec.structs.replace(services.config, bounds=bounds)
    room = services.body_rooms.answers
    for owner in ("a", "b"):
        await room.take(room.place(owner, room.capacity, lambda: None), room.capacity)
    response = await (await answer_wide(services, oai, [wide()], stream=streamed))
    error = (events(response)[-1] if streamed else response.json())["error"]
    assert response.status_code == (200 if streamed else 429)
    assert (error["type"], "the limit answers_bytes" in error["message"]) == ("rate_limit_error", True)


async def test_likeliest_tokens_of_all_prompts_of_a_call_are_limited(services, oai):
    refused = await oai.post(
        "completions", json=completion(prompt=[[1]] * 8, n=128, max_tokens=8, logprobs=256)
    )
    assert (refused.status_code, "at most 1048576 are given by one call" in refused.text) == (400, True)
    assert services.scheduler.arrived == []


async def test_a_list_longer_than_any_prompt_is_refused_by_its_length(services, oai):
    refused = await oai.post("completions", json=completion(prompt=[1] * 100_000))
    assert (refused.status_code, "prompt is a list of 100000" in refused.text) == (400, True)
