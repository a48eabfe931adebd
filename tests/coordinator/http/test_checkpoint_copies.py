import asyncio

import pytest

from tests.coordinator.http.tinker.test_checkpoints import load, result, save

sqlite_only = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


@pytest.fixture
async def source(api, model_id):
    return (await save(api, model_id, user_metadata={"step": "1"}, ttl_seconds=7200))["path"]


async def copy(api, path, headers=None, **where):
    where = where or {"destination_project_id": "archive"}
    return await api.post("copy_weights", json={"source_path": path, **where}, headers=headers)


async def copied(api, path, **more):
    return (await copy(api, path, **more)).raise_for_status().json()["tinker_path"]


def run_of(path):
    return path.removeprefix("tinker://").partition("/")[0]


async def test_a_copy_is_a_checkpoint_of_a_run_of_its_own(api, source, model_id, services):
    path = await copied(api, source)
    run_id = run_of(path)
    assert path == f"tinker://{run_id}/weights/ck1"
    assert run_id != model_id
    (listed,) = (await api.get(f"training_runs/{run_id}/checkpoints")).json()["checkpoints"]
    assert (listed["size_bytes"], listed["user_metadata"]) == (7, {"step": "1"})
    assert (listed["expires_at"], listed["public"]) == (None, False)  # not those of the source
    run = (await api.get(f"training_runs/{run_id}")).json()
    assert (run["lora_rank"], run["last_checkpoint"]["tinker_path"]) == (8, path)
    session = await services.catalog.session(run_id.partition(":")[0])
    assert session.project_id == "archive"


async def test_a_copy_outlives_its_source_without_taking_room_of_its_own(api, source, session_id, services):
    path = await copied(api, source, destination_project_id="archive", ttl_seconds=3600)
    (file,) = services.config.checkpoints_dir.glob(f"{run_of(path).replace(':', '_')}/weights/ck1/shards/*")
    assert file.stat().st_nlink == 2
    (await api.delete(f"training_runs/{run_of(source)}/checkpoints/weights/ck1")).raise_for_status()
    loaded = await result(api, "load_weights", load(session_id, path))
    assert loaded["path"] == path


@sqlite_only
async def test_the_same_key_is_the_same_copy_also_of_those_sent_at_once(api, source, client_for):
    key = {"X-Idempotency-Key": "k"}
    first, *more = await asyncio.gather(*(copied(api, source, headers=key) for _ in range(4)))
    assert more == [first] * 3
    assert await copied(api, source, headers={"X-Idempotency-Key": "another"}) != first
    assert await copied(api, source, headers=key, destination_project_id="elsewhere") != first
    root = await client_for("root", role="admin")
    assert await copied(root, source, headers=key) != first


@sqlite_only
async def test_a_copy_may_take_a_number_of_a_session_and_keeps_it(api, source, session_id, model_id):
    where = {"session_id": session_id, "model_seq_id": 5}
    path = await copied(api, source, **where)
    assert run_of(path) == f"{session_id}:train:5"
    assert await copied(api, source, **where) == path
    other = (await save(api, model_id, "other", seq_id=2))["path"]
    for answer in (
        await copy(api, other, **where),
        await copy(api, source, session_id=session_id, model_seq_id=0),
    ):
        assert answer.status_code == 400
        assert "already in use" in answer.json()["detail"]
    lora = {"rank": 8}
    create = {**where, "base_model": "Qwen/Qwen3-0.6B", "lora_config": lora}
    answer = await api.post("create_model", json=create)
    assert "already used for copy_weights" in answer.json()["detail"]


@sqlite_only
async def test_the_run_of_a_copy_cannot_be_trained(api, source, session_id):
    path = await copied(api, source, session_id=session_id, model_seq_id=5)
    step = {"model_id": run_of(path), "seq_id": 1, "adam_params": {"learning_rate": 1.0}}
    failure = await result(api, "optim_step", step)
    assert failure == {
        "error": f"{run_of(path)} only holds a copy of {source}; load the copy into a new model to train it",
        "category": "user",
    }


@sqlite_only
@pytest.mark.parametrize(
    "where",
    [
        {"session_id": "s"},
        {"model_seq_id": 1},
        {"ttl_seconds": None},
        {"destination_project_id": "p", "session_id": "s", "model_seq_id": 1},
        {"destination_project_id": "p", "ttl_seconds": 3599},
    ],
)
async def test_what_says_not_where_to_copy_is_refused(api, source, where):
    assert (await copy(api, source, **where)).status_code == 400


@sqlite_only
async def test_a_damaged_checkpoint_is_not_copied(api, source, services):
    (file,) = services.config.checkpoints_dir.glob("*/weights/ck1/shards/*")
    file.write_bytes(b"weightz")
    answer = await copy(api, source)
    assert answer.status_code == 400
    assert "is damaged" in answer.json()["detail"]
    assert len((await api.get("checkpoints")).json()["checkpoints"]) == 1


@sqlite_only
async def test_anothers_checkpoint_is_read_with_a_key_that_can_read_it(
    api, source, client_for, services, session_id
):
    owner, other = await client_for("local", role="read-only"), await client_for("other")
    key = owner.headers["x-api-key"]
    assert (await copy(other, source)).status_code == 404
    by_header = await copied(other, source, headers={"X-Tinker-Weights-Access-Token": key})
    by_body = await copied(other, source, destination_project_id="p", weights_access_token=key)
    for path in (by_header, by_body):
        assert (await other.post("weights_info", json={"tinker_path": path})).status_code == 200
        assert (await owner.post("weights_info", json={"tinker_path": path})).status_code == 404
    session = (await other.post("create_session", json={})).json()["session_id"]
    assert (await other.post("load_weights", json=load(session, source))).status_code == 404
    await result(other, "load_weights", load(session, source, weights_access_token=key))
    into = {"model_id": f"{session}:train:1", "path": source, "optimizer": False}
    assert "error" in await result(other, "load_weights", {**into, "seq_id": 1})
    with_key = {**into, "seq_id": 2, "weights_access_token": key}
    assert (await result(other, "load_weights", with_key))["path"] == source
    wrong = {**into, "seq_id": 3, "weights_access_token": "tml-wrong"}
    assert "weights_access_token cannot be used" in (await result(other, "load_weights", wrong))["error"]
    for request in services.scheduler.arrived:
        assert key.encode() not in await services.queue.payload(request)
