import time

from spmd_tx.coordinator.housekeeping import RESULTS_KEPT_SECONDS, tidy


async def test_nothing_that_is_in_use_is_tidied_away(api, session_id, model_id, services):
    await tidy(services, time.time())
    assert services.scheduler.ended_sessions == []
    assert (await api.post("session_heartbeat", json={"session_id": session_id})).status_code == 200


async def test_a_silent_session_gives_its_place_back(api, session_id, services):
    await tidy(services, time.time() + services.config.session_timeout + 1)
    assert services.scheduler.ended_sessions == [session_id]
    assert (await api.post("session_heartbeat", json={"session_id": session_id})).status_code == 410


async def test_results_and_checkpoints_do_not_pile_up(no_cache, api, model_id, services):
    save = {"model_id": model_id, "path": "ck1", "seq_id": 1, "ttl_seconds": 3600}
    request_id = (await api.post("save_weights", json=save)).json()["request_id"]
    await api.post("retrieve_future", json={"request_id": request_id})

    await tidy(services, time.time() + services.config.session_timeout + RESULTS_KEPT_SECONDS + 1)

    assert (await api.get("checkpoints")).json()["checkpoints"] == []
    assert (await api.post("retrieve_future", json={"request_id": request_id})).status_code == 404
