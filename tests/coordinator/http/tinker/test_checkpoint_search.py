import pytest
from sqlalchemy import update

from spmd_tx.coordinator.storage.tables import CheckpointRow
from tests.coordinator.conftest import BASE_MODEL
from tests.coordinator.http.tinker.test_checkpoints import result, save


@pytest.fixture
async def saved(api, model_id):
    """Three checkpoints, the newest first."""
    paths = [
        (await save(api, model_id, f"ck{number}", seq_id=number, user_metadata={"step": str(number)}))["path"]
        for number in (1, 2)
    ]
    sampler = {"model_id": model_id, "path": "s", "seq_id": 3}
    return [(await result(api, "save_weights_for_sampler", sampler))["path"], *reversed(paths)]


async def search(api, **body):
    return (await api.post("checkpoints/search", json=body)).raise_for_status().json()


async def found(api, **body):
    return [each["tinker_path"] for each in (await search(api, **body))["checkpoints"]]


async def test_checkpoints_are_found_by_what_they_are(api, saved, session_id):
    await api.put(f"sessions/{session_id}/project", json={"project_id": "p"})
    sampler, second, first = saved
    assert await found(api) == saved
    assert await found(api, user_metadata={"step": "2"}) == [second]
    assert await found(api, user_metadata={"step": "2", "more": ""}) == []
    assert await found(api, checkpoint_type="sampler") == [sampler]
    assert await found(api, base_models=[BASE_MODEL], checkpoint_type="training") == [second, first]
    assert await found(api, base_models=[]) == await found(api, base_models=["other"]) == []
    assert await found(api, project_ids=["p"]) == saved
    assert await found(api, owner={"type": "user", "owner_urns": ["nobody"]}) == []
    unknown = await api.post("checkpoints/search", json={"project_ids": ["p", "q"]})
    assert unknown.status_code == 404
    assert "'q'" in unknown.json()["detail"]


async def test_pages_follow_one_another(api, saved):
    first = await search(api, limit=2)
    second = await search(api, limit=2, cursor=first["next_cursor"])
    assert [each["tinker_path"] for each in first["checkpoints"] + second["checkpoints"]] == saved
    assert second["next_cursor"] is None


@pytest.mark.parametrize("uuid", ["4", "ffffffff-ffff-ffff-ffff-ffffffffffff"])
async def test_a_cursor_that_was_made_up_is_refused(api, uuid):
    cursor = {"last_created_at": "2026-01-01T00:00:00Z", "last_checkpoint_uuid": uuid}
    answer = await api.post("checkpoints/search", json={"cursor": cursor})
    assert answer.status_code == 400
    assert "next_cursor" in answer.json()["detail"]


async def test_each_owner_finds_their_own(client_for):
    alice, mallory = await client_for("alice"), await client_for("mallory")
    session = (await alice.post("create_session", json={"tags": []})).json()["session_id"]
    model = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
    model_id = (await result(alice, "create_model", model))["model_id"]
    path = (await save(alice, model_id))["path"]
    for owner in ({"type": "own"}, {"type": "accessible"}, {"type": "user", "owner_urns": ["alice"]}):
        assert await found(alice, owner=owner) == [path]
        assert await found(mallory, owner=owner) == []


async def test_every_listing_names_the_base_model(api, saved, model_id):
    for listing in ("checkpoints", f"training_runs/{model_id}/checkpoints"):
        listed = (await api.get(listing)).json()["checkpoints"]
        assert {each["base_model"] for each in listed} == {BASE_MODEL}
    run = (await api.get(f"training_runs/{model_id}")).json()
    assert run["last_checkpoint"]["base_model"] == BASE_MODEL


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_the_next_start_learns_the_base_model_from_the_folder(api, saved, services):
    async with services.database.transaction() as db:
        await db.execute(update(CheckpointRow).values(base_model=None))
    assert await found(api, base_models=[BASE_MODEL]) == []
    await services.checkpoints.reconcile()
    assert await found(api, base_models=[BASE_MODEL]) == saved
