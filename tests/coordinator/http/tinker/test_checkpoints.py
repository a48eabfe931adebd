import pytest
from sqlalchemy import update

from spmd_tx.coordinator.storage.tables import CheckpointRow

BASE_MODEL = "Qwen/Qwen3-0.6B"


async def result(api, path, body):
    """POST, wait for the future, and return its JSON."""
    response = await api.post(path, json=body)
    assert response.status_code == 200, response.text
    return (await api.post("retrieve_future", json={"request_id": response.json()["request_id"]})).json()


async def save(api, model_id, name="ck1", seq_id=1, **options):
    body = {"model_id": model_id, "path": name, "seq_id": seq_id, "overwrite": False, **options}
    return await result(api, "save_weights", body)


def load(session_id, path, number=1, **changes):
    return {"session_id": session_id, "model_seq_id": number, "path": path, "optimizer": True} | changes


async def test_a_saved_state_has_a_path(api, model_id):
    assert await save(api, model_id) == {"type": "save_weights", "path": f"tinker://{model_id}/weights/ck1"}


async def test_a_name_in_use_fails_through_the_future(api, model_id):
    await save(api, model_id)
    failure = await save(api, model_id, seq_id=2)
    assert failure["category"] == "user"
    assert "exists" in failure["error"]


async def test_a_model_is_created_from_a_state(api, session_id, model_id):
    path = (await save(api, model_id))["path"]
    loaded = await result(api, "load_weights", load(session_id, path))
    assert loaded["model_id"] == f"{session_id}:train:1"
    info = (await api.post("get_info", json={"model_id": loaded["model_id"]})).json()
    assert info["lora_rank"] == 8


async def test_loading_into_a_model_is_a_request_of_its_line(api, model_id, services):
    path = (await save(api, model_id))["path"]
    body = {"model_id": model_id, "seq_id": 2, "path": path, "optimizer": False}
    assert (await result(api, "load_weights", body))["path"] == path
    assert (services.scheduler.arrived[-1].kind, services.scheduler.arrived[-1].seq_id) == ("load_weights", 2)


async def test_loading_what_does_not_exist_into_a_model_fails_through_the_future(api, model_id):
    body = {"model_id": model_id, "seq_id": 1, "path": "tinker://r/weights/gone", "optimizer": False}
    failure = await result(api, "load_weights", body)
    assert failure["category"] == "user"
    assert "does not exist" in failure["error"]


@pytest.mark.parametrize(
    "path, status, complaint",
    [
        ("tinker://r/weights/gone", 404, "list_user_checkpoints"),
        ("tinker://r/sampler_weights/s", 400, "save_state"),
        ("/etc/passwd", 400, "tinker://"),
        ("tinker://../weights/x", 400, "'..'"),
    ],
)
async def test_a_model_cannot_be_created_from_nothing(api, session_id, path, status, complaint):
    response = await api.post("load_weights", json=load(session_id, path))
    assert response.status_code == status
    assert complaint in response.json()["detail"]


async def test_a_truncated_checkpoint_is_refused(api, session_id, model_id, services):
    path = (await save(api, model_id))["path"]
    folder = services.config.checkpoints_dir / model_id.replace(":", "_") / "weights" / "ck1"
    (folder / "shards" / "0.bin").write_bytes(b"")
    response = await api.post("load_weights", json=load(session_id, path))
    assert response.status_code == 400
    assert "damaged" in response.json()["detail"]


async def test_loading_needs_one_of_the_two_addresses(api):
    response = await api.post("load_weights", json={"path": "tinker://r/weights/w", "optimizer": False})
    assert response.status_code == 400
    assert "model_seq_id" in response.json()["detail"]


async def test_a_named_sampler_checkpoint_has_a_path_and_no_session(api, model_id):
    body = {"model_id": model_id, "path": "s1", "kind": "snapshot", "seq_id": 1}
    assert await result(api, "save_weights_for_sampler", body) == {
        "type": "save_weights_for_sampler",
        "path": f"tinker://{model_id}/sampler_weights/s1",
        "sampling_session_id": None,
    }


async def test_an_ephemeral_save_shares_the_counter_of_sampling_sessions(api, session_id, model_id):
    body = {"model_id": model_id, "sampling_session_seq_id": 5, "kind": "inflight", "seq_id": 1}
    saved = await result(api, "save_weights_for_sampler", body)
    assert saved["sampling_session_id"] == f"{session_id}:sample:5"
    assert saved["path"] is None
    taken = {"session_id": session_id, "sampling_session_seq_id": 5, "base_model": BASE_MODEL}
    assert (await api.post("create_sampling_session", json=taken)).status_code == 400


async def test_checkpoints_are_listed_by_run_and_all_together(api, model_id):
    await save(api, model_id, "first", user_metadata={"step": "1"})
    await save(api, model_id, "second", seq_id=2, ttl_seconds=3600)
    of_run = (await api.get(f"training_runs/{model_id}/checkpoints")).json()["checkpoints"]
    everything = (await api.get("checkpoints?limit=1&offset=1")).json()
    assert [checkpoint["checkpoint_id"] for checkpoint in of_run] == ["weights/second", "weights/first"]
    assert everything["cursor"] == {"offset": 1, "limit": 1, "total_count": 2}
    (first,) = everything["checkpoints"]
    assert first == of_run[1]
    assert (first["checkpoint_type"], first["size_bytes"], first["public"]) == ("training", 7, False)
    assert (first["user_metadata"], first["expires_at"]) == ({"step": "1"}, None)
    assert of_run[0]["expires_at"] is not None


async def test_a_run_tells_its_last_checkpoint(api, model_id):
    await save(api, model_id, "first")
    await save(api, model_id, "second", seq_id=2)
    run = (await api.get(f"training_runs/{model_id}")).json()
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/second"


async def test_a_checkpoint_can_be_deleted(api, model_id):
    await save(api, model_id)
    address = f"training_runs/{model_id}/checkpoints/weights/ck1"
    headers = {"content-type": "application/json"}
    assert (await api.delete(address, headers=headers)).status_code == 200
    assert (await api.get("checkpoints")).json()["checkpoints"] == []
    assert (await api.delete(address, headers=headers)).status_code == 404


async def test_a_checkpoint_can_be_published_and_withdrawn(api, model_id):
    await save(api, model_id)
    address = f"training_runs/{model_id}/checkpoints/weights/ck1/publish"
    headers = {"content-type": "application/json"}
    assert (await api.post(address, headers=headers)).status_code == 200
    assert (await api.get("checkpoints")).json()["checkpoints"][0]["public"] is True
    assert (await api.delete(address)).status_code == 200
    assert (await api.get("checkpoints")).json()["checkpoints"][0]["public"] is False


async def test_how_long_a_checkpoint_is_kept_can_be_changed(api, model_id):
    await save(api, model_id)
    address = f"training_runs/{model_id}/checkpoints/weights/ck1/ttl"
    for ttl_seconds, is_set in ((3600, True), (None, False)):
        assert (await api.put(address, json={"ttl_seconds": ttl_seconds})).status_code == 200
        checkpoint = (await api.get("checkpoints")).json()["checkpoints"][0]
        assert (checkpoint["expires_at"] is not None) == is_set
    assert (await api.put(address, json={"ttl_seconds": 0})).status_code == 400


async def test_a_checkpoint_tells_how_to_rebuild_its_model(api, model_id):
    path = (await save(api, model_id))["path"]
    assert (await api.post("weights_info", json={"tinker_path": path})).json() == {
        "base_model": BASE_MODEL,
        "lora_rank": 8,
        "train_unembed": True,
        "train_mlp": True,
        "train_attn": True,
        "is_lora": True,
        "optimizer_config": {"type": "adamw"},
    }


async def test_paging_through_all_checkpoints_shows_each_of_them_once(api, model_id):
    for number in range(7):
        await save(api, model_id, f"step-{number}", seq_id=number + 1)
    pages = [(await api.get(f"checkpoints?limit=3&offset={offset}")).json() for offset in (0, 3, 6, 9)]
    assert [len(page["checkpoints"]) for page in pages] == [3, 3, 1, 0]
    assert {page["cursor"]["total_count"] for page in pages} == {7}
    listed = [checkpoint["checkpoint_id"] for page in pages for checkpoint in page["checkpoints"]]
    assert listed == [f"weights/step-{number}" for number in reversed(range(7))]


async def test_a_page_beyond_all_is_empty(api, model_id):
    page = (await api.get(f"checkpoints?limit=0&offset={10**30}")).json()
    assert (page["checkpoints"], page["cursor"]["limit"]) == ([], 1)


async def test_an_expired_checkpoint_is_listed_no_more(api, model_id, services):
    await save(api, model_id, ttl_seconds=3600)
    await save(api, model_id, "kept", seq_id=2)
    async with services.database.transaction() as db:
        await db.execute(update(CheckpointRow).where(CheckpointRow.name == "ck1").values(expires_at=1.0))
    for route in ("checkpoints", f"training_runs/{model_id}/checkpoints"):
        listed = (await api.get(route)).json()["checkpoints"]
        assert [each["checkpoint_id"] for each in listed] == ["weights/kept"]


async def test_overwriting_replaces_what_was_said_of_a_checkpoint(api, model_id):
    await save(api, model_id, user_metadata={"step": "1", "note": "x"}, ttl_seconds=3600)
    address = f"training_runs/{model_id}/checkpoints/weights/ck1/publish"
    (await api.post(address)).raise_for_status()
    await save(api, model_id, seq_id=2, overwrite=True, user_metadata={"step": 2})
    (listed,) = (await api.get("checkpoints")).json()["checkpoints"]
    assert (listed["user_metadata"], listed["expires_at"], listed["public"]) == ({"step": "2"}, None, False)


@pytest.mark.parametrize(
    "recipients, told",
    [
        (["ssh-rsa AAAAB3NzaC1yc2EAAAAAAAAAAQA="], "no public key"),
        (["x" * 5000], "at most 4096"),
        (["me"] * 11, "11 entries"),
    ],
)
async def test_an_export_to_what_is_no_key_fails_through_the_future(
    api, model_id, services, recipients, told
):
    body = {"model_id": model_id, "path": "out", "seq_id": 1, "age_encryption_recipients": recipients}
    failure = await result(api, "save_weights_external", body)
    assert failure["category"] == "user"
    assert told in failure["error"]
    assert [request.kind for request in services.scheduler.arrived] == ["create_model"]  # nobody works on it
