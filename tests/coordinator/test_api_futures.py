import asyncio

import pytest
from sqlalchemy.exc import OperationalError

from spmd_tx.coordinator import api_futures


@pytest.fixture
def no_patience(monkeypatch):
    monkeypatch.setattr(api_futures, "LONG_POLL_SECONDS", 0.0)


@pytest.fixture
async def request_id(api, model_id, services):
    """A request that nobody answers."""
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
