import asyncio
import json

import pytest

from spmd_tx.coordinator.requests.runs import news_streams, run_news
from spmd_tx.coordinator.tenancy import keys

BASE_MODEL = "Qwen/Qwen3-0.6B"


@pytest.fixture
def quickly(monkeypatch):
    monkeypatch.setattr(run_news, "SECONDS", 0.01)


@pytest.fixture
def streams_of(services):
    """Open a stream of an owner, who must have a key, or of everybody on a server without keys."""

    def streams_of(owner=None):
        if owner is None:
            caller = services.keyring.caller(None)
        else:
            (row,) = (row for row in services.keyring._by_id.values() if row.owner == owner)
            caller = services.keyring.holder(row.id)
        return services.streams.events(caller, services.health.closing)

    return streams_of


def runs_of(event):
    kind, content, *_ = event.decode().split("\r\n")
    assert kind == "event: changed"
    return json.loads(content.removeprefix("data: "))["runs"]


async def new_run(api):
    session = (await api.post("create_session", json={})).json()["session_id"]
    lora = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
    return (await api.post("create_model", json=lora)).json()["model_id"]


async def next_of(stream):
    return await asyncio.wait_for(anext(stream, None), 60)


async def started(*those):
    """Let streams wait for their first events."""
    waiting = [asyncio.ensure_future(next_of(stream)) for stream in those]
    await asyncio.sleep(0.05)
    return waiting


async def test_a_stream_is_alive_and_tells_of_runs_that_have_changed(
    api, services, model_id, streams_of, quickly, monkeypatch
):
    monkeypatch.setattr(news_streams, "ALIVE_SECONDS", 0.02)
    stream = streams_of()
    assert await next_of(stream) == news_streams.ALIVE
    sent = {"metrics": {"reward": 1.0}}
    (await api.post(f"training_runs/{model_id}/metrics", json=sent)).raise_for_status()
    while (event := await next_of(stream)) == news_streams.ALIVE:
        pass
    assert runs_of(event) == [model_id]
    await stream.aclose()


async def test_streams_of_one_sight_share_an_event_and_others_hear_nothing_of_it(
    client_for, services, streams_of, quickly
):
    alice, _ = await client_for("alice"), await client_for("bob")
    await client_for("root", role="admin")
    run = await new_run(alice)
    waiting = await started(*(streams_of(owner) for owner in ("alice", "alice", "root", "bob")))
    await alice.post(f"training_runs/{run}/metrics", json={"metrics": {"reward": 1.0}})
    one, other, of_root = [await each for each in waiting[:3]]
    assert one is other
    assert runs_of(one) == runs_of(of_root) == [run]
    assert not waiting[3].done()
    services.health.closing.set_result(None)
    assert await waiting[3] is None


async def test_the_stream_of_a_revoked_key_ends_before_the_next_look_for_news(
    services, client_for, streams_of, monkeypatch
):
    monkeypatch.setattr(run_news, "SECONDS", 3600.0)
    monkeypatch.setattr(news_streams, "KEY_SECONDS", 0.01)
    await client_for("alice")
    await client_for("bob")
    of_alice, of_bob = await started(streams_of("alice"), streams_of("bob"))
    (row,) = (row for row in services.keyring._by_id.values() if row.owner == "alice")
    async with services.database.transaction() as db:
        await keys.revoke(db, row.id)
    await services.keyring.look()
    assert await of_alice is None
    assert not of_bob.done()
    of_bob.cancel()


async def test_streams_are_bounded_for_each_owner_and_in_all(services, client_for, streams_of, monkeypatch):
    monkeypatch.setattr(services.streams, "_most_of_owner", 2)
    monkeypatch.setattr(services.streams, "_most", 3)
    clients = {owner: await client_for(owner) for owner in ("alice", "bob", "carol")}
    waiting = await started(streams_of("alice"), streams_of("alice"))
    refused = await clients["alice"].get("http://server/console/api/stream")
    assert refused.status_code == 429
    assert "limit console_streams)" in refused.json()["detail"]
    assert "retry-after" in refused.headers
    waiting += await started(streams_of("bob"))
    refused = await clients["carol"].get("http://server/console/api/stream")
    assert refused.status_code == 429
    assert "limit console_streams_in_all)" in refused.json()["detail"]
    assert await next_of(streams_of("carol")) is None  # it came in between
    for each in waiting:
        each.cancel()
    await asyncio.wait(waiting)
    services.streams.check(services.keyring.caller(clients["alice"].headers["x-api-key"]))


async def test_a_slow_reader_is_dropped_and_holds_nobody_up(
    api, services, model_id, streams_of, quickly, monkeypatch
):
    monkeypatch.setattr(news_streams, "MOST_BEHIND", 2)
    slow = streams_of()
    first = await started(slow)
    services.queue.news.add(model_id)
    assert runs_of(await first[0]) == [model_id]
    reading = streams_of()
    for _ in range(4):
        (waiting,) = await started(reading)
        services.queue.news.add(model_id)
        assert runs_of(await waiting) == [model_id]
    assert await next_of(slow) is None
    await reading.aclose()


async def test_a_run_that_is_gone_ends_no_stream(api, services, model_id, streams_of, quickly):
    stream = streams_of()
    (waiting,) = await started(stream)
    services.queue.news.add("no such run")
    services.queue.news.add(model_id)
    assert runs_of(await waiting) == [model_id]
    await stream.aclose()
