import asyncio
import time

import pytest

from spmd_tx.coordinator.server import housekeeping
from spmd_tx.coordinator.server.housekeeping import run_housekeeping, tidy


@pytest.fixture
def after_all_times(services):
    """Seconds after which no client is there any more, and no result is wanted."""
    return services.config.session_timeout + services.config.keep_results_hours * 3600 + 1


async def test_nothing_that_is_in_use_is_tidied_away(api, session_id, model_id, services):
    await tidy(services)
    assert services.scheduler.ended_sessions == []
    assert (await api.post("session_heartbeat", json={"session_id": session_id})).status_code == 200


async def test_a_silent_session_gives_its_place_back(api, session_id, services):
    await tidy(services, ahead=services.config.session_timeout + 1)
    assert services.scheduler.ended_sessions == [session_id]
    assert (await api.post("session_heartbeat", json={"session_id": session_id})).status_code == 410


async def test_checkpoints_of_a_silent_session_stay(api, session_id, model_id, services):
    request = {"model_id": model_id, "path": "ck1", "seq_id": 1}
    request_id = (await api.post("save_weights", json=request)).json()["request_id"]
    await api.post("retrieve_future", json={"request_id": request_id})
    await tidy(services, ahead=services.config.session_timeout + 1)
    (checkpoint,) = (await api.get("checkpoints")).json()["checkpoints"]
    body = {"tinker_path": checkpoint["tinker_path"]}
    assert (await api.post("weights_info", json=body)).status_code == 200
    (found,) = (await api.post("sessions/search", json={})).json()["sessions"]
    assert (found["session_id"], found["status"], found["checkpoints_count"]) == (session_id, None, 1)


async def test_results_and_checkpoints_do_not_pile_up(no_cache, api, model_id, services, after_all_times):
    save = {"model_id": model_id, "path": "ck1", "seq_id": 1, "ttl_seconds": 3600}
    request_id = (await api.post("save_weights", json=save)).json()["request_id"]
    await api.post("retrieve_future", json={"request_id": request_id})

    await tidy(services, ahead=after_all_times)

    assert (await api.get("checkpoints")).json()["checkpoints"] == []
    assert (await api.post("retrieve_future", json={"request_id": request_id})).status_code == 404


@pytest.mark.parametrize("days", [1, -1])
async def test_a_clock_that_is_set_ends_no_session_and_loses_no_result(
    no_cache, api, session_id, model_id, services, monkeypatch, days
):
    async def save(seq_id):
        body = {"model_id": model_id, "path": f"ck{seq_id}", "seq_id": seq_id}
        return (await api.post("save_weights", json=body)).json()["request_id"]

    services.reaper._started_at -= 48 * 3600
    before = await save(1)
    jumped = time.time() + days * 24 * 3600
    monkeypatch.setattr(time, "time", lambda: jumped)
    after = await save(2)
    for request_id in (before, after):
        assert (await api.post("retrieve_future", json={"request_id": request_id})).status_code == 200

    await tidy(services)

    assert services.scheduler.ended_sessions == []
    assert (await api.post("session_heartbeat", json={"session_id": session_id})).status_code == 200
    for request_id in (before, after):
        assert (await api.post("retrieve_future", json={"request_id": request_id})).status_code == 200


async def test_a_clock_that_is_set_deletes_no_checkpoint(api, model_id, services, monkeypatch):
    save = {"model_id": model_id, "path": "ck1", "seq_id": 1, "ttl_seconds": 3600}
    request_id = (await api.post("save_weights", json=save)).json()["request_id"]
    await api.post("retrieve_future", json={"request_id": request_id})
    await tidy(services)
    jumped = time.time() + 30 * 24 * 3600
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: jumped)
        services.reaper.clock._wall = time.time
        await tidy(services)
    (checkpoint,) = (await api.get("checkpoints")).json()["checkpoints"]
    assert checkpoint["tinker_path"].endswith("/ck1")


@pytest.mark.parametrize("part", ["tidy", "measure"])
async def test_a_mistake_in_one_round_of_housekeeping_is_reported_and_the_next_one_comes(
    services, monkeypatch, caplog, part
):
    rounds = []

    async def mistaken(_):
        rounds.append(part)
        raise ZeroDivisionError

    monkeypatch.setattr(housekeeping, part, mistaken)
    for name in ("SECONDS_BETWEEN", "SECONDS_BETWEEN_LOOKS", "SECONDS_BETWEEN_MEASUREMENTS"):
        monkeypatch.setattr(housekeeping, name, 0.01)
    keeping = asyncio.create_task(run_housekeeping(services))
    while len(rounds) < 3:
        assert not keeping.done()
        await asyncio.sleep(0.01)
    keeping.cancel()
    await asyncio.wait([keeping])
    assert caplog.text.count("internal error") >= 2
