import asyncio

import pytest
from sqlalchemy.exc import OperationalError

from spmd_tx.coordinator.catalog.catalog import open_catalog
from spmd_tx.coordinator.http.tinker import futures
from spmd_tx.coordinator.requests import rows
from spmd_tx.coordinator.requests.records import Failed
from tests.coordinator.conftest import BASE_MODEL


@pytest.fixture
def no_patience(monkeypatch):
    monkeypatch.setattr(futures, "LONG_POLL_SECONDS", 0.0)


@pytest.fixture
async def request_id(api, model_id, services):
    """Submit a request that is never answered."""
    services.scheduler.is_paused = True
    step = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": 0.5}}
    return (await api.post("optim_step", json=step)).json()["request_id"]


def retrieve(api, request_id):
    return api.post("retrieve_future", json={"request_id": request_id, "allow_metadata_only": True})


async def test_a_result_can_be_fetched_again(api, model_id):
    step = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": 0.5}}
    request_id = (await api.post("optim_step", json=step)).json()["request_id"]
    for _ in range(2):
        response = await retrieve(api, request_id)
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"
        assert response.json() == {"metrics": {"learning_rate": 0.5}}


async def test_a_pending_future_says_to_try_again_and_why(api, request_id, no_patience):
    response = await retrieve(api, request_id)
    assert response.status_code == 408
    assert response.json() == {
        "type": "try_again",
        "request_id": request_id,
        "queue_state": "paused_capacity",
        "queue_state_reason": "all adapters are in use",
    }


async def test_a_long_poll_ends_when_the_server_closes_and_the_request_stays(api, request_id, services):
    polling = asyncio.create_task(retrieve(api, request_id))
    await asyncio.sleep(0)
    services.health.closing.set_result(None)
    response = await polling
    assert response.status_code == 408
    assert response.json()["type"] == "try_again"


@pytest.fixture
async def sampler_id(api, session_id):
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    return (await api.post("create_sampling_session", json=body)).json()["sampling_session_id"]


async def sample(api, sampler_id, seq_id):
    body = {
        "sampling_session_id": sampler_id,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 2},
    }
    return (await api.post("asample", json=body)).json()["request_id"]


def poll(api, sampler_id, cursor=0, client=0, **more):
    target = {"type": "sampling_session", "sampling_session_id": sampler_id, "cloned_sampler_id": client}
    return api.post("retrieve_futures", json={"target": target, "prev_cursor": cursor, **more})


async def test_one_poll_waits_for_all_samples_of_a_client(api, sampler_id):
    polling = asyncio.create_task(poll(api, sampler_id))
    await sample(api, sampler_id, 10**9)  # of a copy of the client
    request_id = await sample(api, sampler_id, 0)
    answer = (await polling).json()
    (told,) = answer["completions"]
    result = await retrieve(api, request_id)
    size = len(result.content)
    assert told == {
        "state": "finished",
        "request_id": request_id,
        "response_payload_uncompressed_size": size,
    }
    again = await poll(api, sampler_id, answer["cursor"], timeout=0, retrieved_request_ids=[request_id])
    assert again.json() == {"completions": [], "cursor": answer["cursor"]}
    assert (await retrieve(api, request_id)).content == result.content  # it may have been lost on its way


async def test_failed_samples_are_told_of_too(api, sampler_id, services):
    services.scheduler.is_paused = True
    request_id = await sample(api, sampler_id, 0)
    services.queue.resolve(request_id, Failed("no", "user"))
    told = (await poll(api, sampler_id)).json()["completions"]
    assert told == [{"state": "failed", "request_id": request_id}]


async def test_a_poll_that_has_waited_for_long_is_told_nothing(api, sampler_id, no_patience):
    assert (await poll(api, sampler_id, 5)).json() == {"completions": [], "cursor": 5}


async def test_a_poll_ends_when_the_server_closes_and_comes_back_later(api, sampler_id, services):
    polling = asyncio.create_task(poll(api, sampler_id))
    await asyncio.sleep(0)
    services.health.closing.set_result(None)
    assert (await polling).status_code == 503
    request_id = await sample(api, sampler_id, 0)
    await services.queue.wait(request_id, timeout=60)
    assert (await poll(api, sampler_id)).json()["completions"][0]["request_id"] == request_id


@pytest.mark.parametrize(
    "wrong", [{"cursor": -1}, {"cursor": 2**63}, {"client": -1}, {"client": 2**62}, {"timeout": "soon"}]
)
async def test_a_poll_that_makes_no_sense_is_refused(api, sampler_id, wrong):
    assert (await poll(api, sampler_id, **wrong)).status_code == 400


async def test_only_numbers_that_were_given_can_be_polled_for(api, sampler_id, no_patience):
    refused = await poll(api, sampler_id, client=1)
    assert (refused.status_code, "has no client 1" in refused.text) == (400, True)
    await api.post("join_sampling_session", json={"sampling_session_id": sampler_id})
    assert (await poll(api, sampler_id, client=1)).status_code == 200
    assert (await poll(api, sampler_id, client=2)).status_code == 400


async def test_an_owner_has_a_bounded_number_of_polls(api, sampler_id, services, monkeypatch):
    monkeypatch.setattr(services.polls, "_most_per_owner", 2)
    services.scheduler.is_paused = True
    request_id = await sample(api, sampler_id, 0)
    waiting = [asyncio.create_task(poll(api, sampler_id)), asyncio.create_task(retrieve(api, request_id))]
    while services.polls._of_owner["local"] < 2:
        await asyncio.sleep(0.001)
    for refused in (await poll(api, sampler_id), await retrieve(api, request_id)):
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    services.queue.resolve(request_id, Failed("no", "user"))
    assert [answer.status_code for answer in await asyncio.gather(*waiting)] == [200, 200]
    assert services.polls._of_owner == {}
    assert (await retrieve(api, request_id)).status_code == 200


async def test_copies_of_a_sampling_client_get_numbers_of_their_own(api, sampler_id, services):
    join = {"type": "join_sampling_session", "sampling_session_id": sampler_id}
    answers = await asyncio.gather(*(api.post("join_sampling_session", json=join) for _ in range(5)))
    assert sorted(answer.json()["client_counter"] for answer in answers) == [1, 2, 3, 4, 5]
    restarted = await open_catalog(services.database)
    assert await restarted.join_sampler(await restarted.sampler(sampler_id)) == 6


async def test_a_sampling_session_that_has_ended_cannot_be_joined(api, session_id, sampler_id):
    await api.post(f"sessions/{session_id}/finish", json={"reason": {"type": "success"}})
    answer = await api.post("join_sampling_session", json={"sampling_session_id": sampler_id})
    assert (answer.status_code, "has ended" in answer.text) == (400, True)


@pytest.mark.parametrize("request_id", ["nobody", ""])
async def test_an_unknown_future_is_not_found(api, request_id):
    response = await retrieve(api, request_id)
    assert response.status_code == 404
    assert response.json()["category"] == "user"


async def test_an_id_that_is_no_text_is_refused(api):
    assert (await retrieve(api, 7)).status_code == 400
    assert (await retrieve(api, "a\0b")).status_code == 400


async def test_cancelling_reaches_the_scheduler(api, request_id, services):
    assert (await api.post("cancel_future", json={"request_id": request_id})).status_code == 200
    assert services.scheduler.cancelled == [request_id]


async def test_a_cancellation_is_durable_when_it_is_answered(api, sampler_id, services, monkeypatch):
    services.scheduler.is_paused = True
    request_id = await sample(api, sampler_id, 0)
    cancelled = Failed("cancelled", "user")
    monkeypatch.setattr(services.scheduler, "cancel", lambda id: services.queue.resolve(id, cancelled))
    assert (await api.post("cancel_future", json={"request_id": request_id})).status_code == 200
    async with services.database.reading() as db:
        assert await rows.outcome(db, request_id) == cancelled


async def test_a_cancellation_that_cannot_be_stored_is_to_be_sent_again(
    api, sampler_id, services, monkeypatch
):
    services.scheduler.is_paused = True
    request_id = await sample(api, sampler_id, 0)
    monkeypatch.setattr(futures, "STORAGE_SECONDS", 0.0)
    monkeypatch.setattr(services.queue, "_outcomes", {request_id: Failed("cancelled", "user")})
    assert (await api.post("cancel_future", json={"request_id": request_id})).status_code == 503


async def test_a_route_that_is_not_there_says_so(api):
    response = await api.post("no_such_route", json={})
    assert response.status_code == 404
    assert "/api/v1/no_such_route" in response.json()["detail"]


async def test_an_error_of_ours_is_told_without_its_details(api, request_id, services, monkeypatch, caplog):
    async def wait(request_id, timeout):
        raise LookupError("a secret")

    monkeypatch.setattr(services.queue, "wait", wait)
    response = await retrieve(api, request_id)
    assert response.status_code == 500
    assert response.json()["category"] == "server"
    assert "a secret" not in response.text
    assert "a secret" in caplog.text


async def test_a_database_that_fails_asks_for_another_try(api, request_id, services, monkeypatch):
    async def wait(request_id, timeout):
        raise OperationalError("SELECT", {}, LookupError("connection lost"))

    monkeypatch.setattr(services.queue, "wait", wait)
    response = await retrieve(api, request_id)
    assert response.status_code == 503
    assert response.json()["category"] == "server"
