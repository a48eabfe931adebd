import json

import pytest
from sqlalchemy import update

from spmd_tx.coordinator.retention import rules
from spmd_tx.coordinator.retention.rules import Ages
from spmd_tx.coordinator.scheduler.scheduler import Scheduler
from spmd_tx.coordinator.storage.tables import LOCAL_OWNER, SessionRow
from spmd_tx.coordinator.training.custom_loss_catalog import CustomLossCatalog
from spmd_tx.errors import InvalidRequest
from tests.custom_loss.recorded import recorded


def body(session_id, number=0, case="dpo", **changes):
    return {"session_id": session_id, "custom_loss_seq_id": number, **recorded()[case].definition, **changes}


async def create(api, *arguments, **changes):
    response = await api.post("create_custom_loss", json=body(*arguments, **changes))
    assert response.status_code == 200, response.text
    return response.json()["request_id"]


async def result(api, request_id):
    return (await api.post("retrieve_future", json={"request_id": request_id})).json()


@pytest.fixture
def losses(services):
    return CustomLossCatalog(services.database, services.queue)


async def test_a_loss_gets_an_id_by_which_its_session_finds_it(api, session_id, losses):
    answer = await result(api, await create(api, session_id))
    assert answer["type"] == "create_custom_loss"
    stored = await losses.open(answer["loss_id"], session_id)
    assert (stored.loss.name, len(stored.loss.inputs)) == ("dpo", 4)
    assert await losses.open(answer["loss_id"], session_id) is stored


@pytest.mark.parametrize("owner, is_theirs", [("alice", True), (LOCAL_OWNER, False)])
async def test_losses_of_an_owner_take_turns_however_many_sessions_they_have(
    api, services, session_id, losses, owner, is_theirs
):
    async with services.database.transaction() as db:
        await db.execute(update(SessionRow).values(owner=owner))
    loss_id = (await result(api, await create(api, session_id)))["loss_id"]
    stored = await losses.open(loss_id, session_id)
    assert (stored.tenant == "owner alice") == is_theirs
    assert (stored.tenant == session_id) != is_theirs


async def test_the_same_number_is_the_same_loss(api, session_id):
    first, again = await create(api, session_id), await create(api, session_id)
    assert first == again
    assert await create(api, session_id, 1, "focal") != first


async def test_no_other_session_finds_it(api, session_id, losses):
    loss_id = (await result(api, await create(api, session_id)))["loss_id"]
    other = (await api.post("create_session", json={"tags": []})).json()["session_id"]
    for wrong, session in ((loss_id, other), (loss_id + "0", session_id), ("loss-\0", session_id)):
        with pytest.raises(InvalidRequest, match="does not exist in this session"):
            await losses.open(wrong, session)
    await losses.open(loss_id, session_id)
    with pytest.raises(InvalidRequest, match="does not exist in this session"):
        await losses.open(loss_id, other)


async def test_a_request_of_another_kind_is_no_loss(api, session_id, losses):
    lora = {
        "session_id": session_id,
        "model_seq_id": 0,
        "base_model": "Qwen/Qwen3-0.6B",
        "lora_config": {"rank": 8},
    }
    request_id = (await api.post("create_model", json=lora)).json()["request_id"]
    await result(api, request_id)
    with pytest.raises(InvalidRequest, match="does not exist"):
        await losses.open(f"loss-{request_id}", session_id)


async def test_a_loss_that_is_refused_fails_through_its_future(api, session_id, losses):
    definition = json.loads(json.dumps(recorded()["dpo"].definition))
    definition["graph"]["nodes"][-2]["target"] = "torch.rand"
    request_id = await create(api, session_id, 0, **definition)
    answer = await result(api, request_id)
    assert answer["category"] == "user"
    assert "torch.rand is not among the operations of custom losses" in answer["error"]
    with pytest.raises(InvalidRequest, match="does not exist"):
        await losses.open(f"loss-{request_id}", session_id)


@pytest.mark.parametrize(
    "content, problem",
    [
        (b"{", "cannot take this body"),
        (b'{"session_id": 1}', "cannot take this body"),
        (b"[" * 100_000, "cannot take this body"),
        (b" " * 300_000, "the custom loss has 300000 bytes; at most 262144 are allowed"),
    ],
)
async def test_a_body_that_is_no_graph_is_refused_at_once(api, content, problem):
    response = await api.post(
        "create_custom_loss", content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert problem in response.json()["error"]


async def test_a_loss_of_an_unknown_session_is_refused(api):
    assert (await api.post("create_custom_loss", json=body("nobody"))).status_code == 404


async def test_a_loss_lives_as_long_as_its_session(api, session_id, services, losses):
    loss_id = (await result(api, await create(api, session_id)))["loss_id"]
    late = Ages(now=1e12, results=1e12, open_results=1e12, versions=1e12)
    async with services.database.transaction() as db:
        await rules.forget_requests(db, late)
        await rules.forget_results(db, late)
    await losses.open(loss_id, session_id)
    await api.post(f"sessions/{session_id}/finish", json={"reason": {"type": "success"}})
    async with services.database.transaction() as db:
        await rules.forget_requests(db, late)
    with pytest.raises(InvalidRequest, match="does not exist"):
        await CustomLossCatalog(services.database, services.queue).open(loss_id, session_id)


async def test_a_loss_whose_answer_was_not_stored_before_a_crash_is_answered_after_it(
    api, session_id, services
):
    services.scheduler.is_paused = True  # the answer is lost with the server
    request_id = await create(api, session_id)
    assert [request.id for request in services.queue.unfinished()] == [request_id]
    Scheduler(services.queue, services.catalog, None, None, None)
    assert (await result(api, request_id))["loss_id"] == f"loss-{request_id}"
