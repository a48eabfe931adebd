import asyncio
from contextlib import suppress
from types import SimpleNamespace

import pytest

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.http.security.quotas import Quotas
from spmd_tx.coordinator.tenancy.callers import EVERYONE, Caller, KeyLimits
from spmd_tx.errors import TooManyRequests

BASE_MODEL = "Qwen/Qwen3-0.6B"


@pytest.fixture
def clock():
    """A clock that tests set."""
    return SimpleNamespace(now=0.0)


@pytest.fixture
def quotas(clock):
    return Quotas(None, None, None, Bounds(polls_per_second=100), clock=lambda: clock.now)


def caller(rate, key_id="k"):
    return Caller("alice", "user", key_id, KeyLimits(requests_per_second=rate))


def accepted(quotas: Quotas, who: Caller, tries: int = 50) -> int:
    """Return how many requests pass until one is refused."""
    for number in range(tries):
        try:
            quotas.count_request(who)
        except TooManyRequests:
            return number
    return tries


@pytest.mark.parametrize("rate, burst", [(10.0, 10), (2.5, 2), (0.1, 1)])
def test_a_key_may_send_a_seconds_worth_at_once_and_then_its_rate(quotas, clock, rate, burst):
    assert accepted(quotas, caller(rate)) == burst
    clock.now += 1 / rate
    assert accepted(quotas, caller(rate)) == 1
    clock.now += 1000.0
    assert accepted(quotas, caller(rate)) == burst


def test_each_key_has_a_rate_of_its_own(quotas):
    assert accepted(quotas, caller(1.0, "first")) == 1
    assert accepted(quotas, caller(1.0, "second")) == 1
    assert accepted(quotas, caller(None)) == 50


async def create_session(client):
    return (await client.post("create_session", json={})).json()["session_id"]


def model(session_id, number=0, **lora):
    return {
        "session_id": session_id,
        "model_seq_id": number,
        "base_model": BASE_MODEL,
        "lora_config": {"rank": 8} | lora,
    }


def sample(session_id, number):
    return {
        "num_samples": 1,
        "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 4},
        "sampling_session_id": f"{session_id}:sample:0",
        "seq_id": number,
    }


async def add_sampler(client, session_id):
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    (await client.post("create_sampling_session", json=body)).raise_for_status()


async def test_who_sends_too_fast_is_told_when_to_come_back(client_for):
    client = await client_for("alice", limits=KeyLimits(requests_per_second=0.1))
    assert (await client.get("sessions")).status_code == 200
    refused = await client.get("sessions")
    assert refused.status_code == 429
    assert "may send 0.1 requests per second" in refused.json()["detail"]
    assert 0 < int(refused.headers["retry-after"]) <= 10


async def test_what_the_sdk_sends_by_itself_is_never_too_fast(client_for):
    client = await client_for("alice", limits=KeyLimits(requests_per_second=0.1))
    session_id = await create_session(client)
    for _ in range(5):
        heartbeat = await client.post("session_heartbeat", json={"session_id": session_id})
        poll = await client.post("retrieve_future", json={"request_id": "none"})
        assert (heartbeat.status_code, poll.status_code) == (200, 404)


async def test_an_adapter_beyond_the_limit_is_an_error_of_the_user(client_for):
    limits = KeyLimits(adapters=2)
    client, second_key = await client_for("alice", limits=limits), await client_for("alice", limits=limits)
    session_id = await create_session(client)
    for number in range(2):
        assert (await client.post("create_model", json=model(session_id, number))).status_code == 200
    refused = await second_key.post("create_model", json=model(session_id, 2))
    assert refused.status_code == 400
    assert "'alice' has 2 adapters, and API key" in refused.json()["detail"]
    # One that is there already is the same one.
    assert (await client.post("create_model", json=model(session_id, 1))).status_code == 200
    bob = await client_for("bob", limits=limits)
    assert (await bob.post("create_model", json=model(await create_session(bob)))).status_code == 200


async def test_the_end_of_a_session_makes_room_for_adapters(client_for):
    client = await client_for("alice", limits=KeyLimits(adapters=1))
    first, second = await create_session(client), await create_session(client)
    assert (await client.post("create_model", json=model(first))).status_code == 200
    assert (await client.post("create_model", json=model(second))).status_code == 400
    await client.post(f"sessions/{first}/finish", json={"reason": {"type": "success"}})
    assert (await client.post("create_model", json=model(second))).status_code == 200


async def test_models_created_at_the_same_moment_are_counted(client_for):
    client = await client_for("alice", limits=KeyLimits(adapters=3))
    session_id = await create_session(client)
    answers = await asyncio.gather(
        *(client.post("create_model", json=model(session_id, number)) for number in range(10))
    )
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [400] * 7


async def test_a_full_queue_asks_the_sampler_to_wait(client_for, services):
    client = await client_for("alice", limits=KeyLimits(queued_requests=2))
    session_id = await create_session(client)
    await add_sampler(client, session_id)
    services.scheduler.is_paused = True
    answers = await asyncio.gather(
        *(client.post("asample", json=sample(session_id, number)) for number in range(6))
    )
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429, 429]
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert "'alice' has 2 sample requests in the queue" in refused.json()["detail"]
    assert refused.headers["retry-after"] == "1"

    other = await client_for("bob", limits=KeyLimits(queued_requests=2))
    theirs = await create_session(other)
    await add_sampler(other, theirs)
    assert (await other.post("asample", json=sample(theirs, 0))).status_code == 200


async def test_the_tokens_of_queued_samples_are_limited_but_one_is_always_taken(client_for, services):
    client = await client_for("alice", limits=KeyLimits(queued_tokens=300))
    session_id = await create_session(client)
    await add_sampler(client, session_id)
    services.scheduler.is_paused = True
    answers = [await ask(client, session_id, number, 100) for number in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert "would take 8" in answers[1].json()["detail"]
    assert "allows 300" in answers[1].json()["detail"]


async def test_a_finished_sample_makes_room_in_the_queue(client_for, services):
    client = await client_for("alice", limits=KeyLimits(queued_requests=1))
    session_id = await create_session(client)
    await add_sampler(client, session_id)
    for number in range(3):
        accepted = (await client.post("asample", json=sample(session_id, number))).raise_for_status().json()
        await client.post("retrieve_future", json={"request_id": accepted["request_id"]})
    assert not services.queue.samples.requests


async def ask(client, session_id, number, max_tokens):
    """For four samples of a prompt of three tokens."""
    body = sample(session_id, number) | {"num_samples": 4, "sampling_params": {"max_tokens": max_tokens}}
    return await client.post("asample", json=body)


async def test_too_much_queued_work_asks_those_to_wait_who_gave_more_than_their_share(client_for, services):
    services.quotas.most_queued_tokens = 1000
    services.scheduler.is_paused = True
    alice, bob = await client_for("alice"), await client_for("bob")
    hers, his = await create_session(alice), await create_session(bob)
    for client, session_id in ((alice, hers), (bob, his)):
        await add_sampler(client, session_id)
    prompt = len(sample(hers, 0)["prompt"]["chunks"][0]["tokens"])
    each = prompt + 4 * 100
    answers = [(await ask(alice, hers, number, 100)).status_code for number in range(3)]
    assert answers == [200, 200, 429]
    assert (await ask(alice, hers, 3, (1000 - 2 * each - prompt) // 4)).status_code == 200  # there is room
    assert (await ask(bob, his, 0, 100)).status_code == 200
    refused = await ask(bob, his, 1, 100)
    assert refused.status_code == 429
    assert f"{each} of them for 'bob'" in refused.json()["detail"]
    assert refused.headers["retry-after"] == "1"


async def test_what_is_larger_than_the_queue_is_taken_when_nothing_else_is_there(client_for, services):
    services.quotas.most_queued_tokens = 10
    alice = await client_for("alice")
    session_id = await create_session(alice)
    await add_sampler(alice, session_id)
    for number in range(3):
        accepted = (await ask(alice, session_id, number, None)).raise_for_status().json()
        await alice.post("retrieve_future", json={"request_id": accepted["request_id"]})
    assert services.queue.samples.total_tokens == 0
    assert not services.queue.samples.tokens


async def test_training_is_never_asked_to_wait(client_for, services):
    client = await client_for("alice", limits=KeyLimits(queued_requests=1))
    session_id = await create_session(client)
    await client.post("create_model", json=model(session_id))
    services.scheduler.is_paused = True
    for number in range(5):
        step = {"model_id": f"{session_id}:train:0", "seq_id": number + 1, "adam_params": {}}
        assert (await client.post("optim_step", json=step)).status_code == 200


async def test_samples_of_an_earlier_run_are_in_the_queue(database, tmp_path, running_queue):
    async with running_queue(database, tmp_path) as queue:
        await queue.submit("sample", "s:sample:0", 0, "s", b"")
        await queue.submit("optim_step", "s:train:0", 1, "s", b"")
    async with running_queue(database, tmp_path) as queue:
        assert queue.samples.requests == {"s": 1}


@pytest.mark.parametrize("rate, burst", [(None, 1000), (1.0, 300), (100.0, 1000)])
def test_polls_are_counted_apart_and_generously(quotas, clock, rate, burst):
    who = caller(rate)

    for expected in (burst, burst / 10):
        polls = 0
        with suppress(TooManyRequests):
            while polls < 2000:
                quotas.count_poll(who)
                polls += 1
        assert polls == expected
        clock.now += 1.0
    assert accepted(quotas, who, 1) == 1


def test_without_keys_polls_are_not_counted(quotas):
    for _ in range(2000):
        quotas.count_poll(EVERYONE)


async def test_heartbeats_and_polls_beyond_all_need_wait(client_for, services, monkeypatch):
    client = await client_for("alice", limits=KeyLimits(requests_per_second=0.1))
    session_id = await create_session(client)
    paths = {"session_heartbeat": {"session_id": session_id}, "telemetry": {}}
    paths["retrieve_future"] = {"request_id": "nobody"}
    for path, body in paths.items():
        answers = [await client.post(path, json=body) for _ in range(3)]
        assert 429 not in [answer.status_code for answer in answers]
    buckets = services.quotas._buckets
    (polls,) = (key for key in buckets if key[0] == "polls")
    for path, body in paths.items():
        buckets[polls] = -1e6, buckets[polls][1]
        answer = await client.post(path, json=body)
        assert (answer.status_code, "Retry-After" in answer.headers) == (429, True)


def completion(prompts):
    return {"model": BASE_MODEL, "prompt": prompts, "max_tokens": 4}


async def test_a_call_with_several_prompts_is_as_many_requests(client_for, services):
    client = await client_for("alice", limits=KeyLimits(queued_requests=3))
    client.base_url = client.base_url.join("/oai/api/v1/")
    refused = await client.post("completions", json=completion([[1]] * 4))
    assert (refused.status_code, "send at most 3 prompts at once" in refused.text) == (400, True)
    services.scheduler.is_paused = True
    first = asyncio.create_task(client.post("completions", json=completion([[1]] * 2)))
    while len(services.scheduler.arrived) < 2:
        await asyncio.sleep(0.001)
    later = await client.post("completions", json=completion([[1]] * 2))
    assert (later.status_code, "this call makes 2" in later.text) == (429, True)
    assert len(services.scheduler.arrived) == 2
    first.cancel()
    await asyncio.wait([first])
