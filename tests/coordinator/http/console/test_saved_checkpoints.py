"""Which checkpoint: the step, the reward and the loss at each save, and the mark of the best."""

import pytest
from sqlalchemy import delete, update

from spmd_tx.coordinator.checkpoints.catalog import open_checkpoints
from spmd_tx.coordinator.checkpoints.store import LocalStore
from spmd_tx.coordinator.storage.disk import DiskGuard
from spmd_tx.coordinator.storage.tables import CheckpointRow, RunMetrics
from tests.coordinator.http.console.test_runs import run_id as run_id  # a fixture
from tests.coordinator.http.tinker.test_checkpoints import save
from tests.coordinator.requests.runs.test_run_metrics import settle

SAVED = "http://server/console/api/checkpoints"


async def listed(api, **query):
    """What stands beside each checkpoint, by name: step, metric, value, loss."""
    answer = (await api.get(SAVED, params=query)).raise_for_status().json()
    return {
        each["checkpoint"]["checkpoint_id"].partition("/")[2]: (
            each["step"],
            each["metric"],
            each["value"],
            each["loss"],
        )
        for each in answer["checkpoints"]
    }


@pytest.fixture
async def three_saves(api, services, run_id):
    """Saves before the first step, after one, and after two; the reward is known of the second step only."""

    async def step(seq_id, loss):
        passed = seq_id, "forward_backward", {"loss:sum": loss, "num_tokens:sum": 2.0}
        await settle(services.database, passed, (seq_id + 1, "optim_step", {"norm": 1.0}), line=run_id)

    async def reward(value):
        body = {"metrics": {"env/reward/total": value, "test/accuracy": 1 - value}, "step": 1}
        (await api.post(f"training_runs/{run_id}/metrics", json=body)).raise_for_status()

    await save(api, run_id, "fresh", seq_id=1)
    await step(2, loss=3.0)
    await save(api, run_id, "early", seq_id=5)
    await step(7, loss=1.0)
    await save(api, run_id, "late", seq_id=12)
    await reward(0.75)
    return run_id


async def test_a_checkpoint_has_the_step_the_reward_and_the_loss_of_its_save(api, three_saves):
    assert await listed(api, run=three_saves) == {
        "fresh": (0, None, None, None),
        "early": (1, None, None, 1.5),
        "late": (2, "env/reward/total", 0.75, 0.5),
    }
    assert await listed(api, metric="test/accuracy", limit=1) == {"late": (2, "test/accuracy", 0.25, 0.5)}
    assert await listed(api, run="another:train:0") == {}
    page = (await api.get(SAVED, params={"limit": 1, "offset": 1})).json()
    assert page["cursor"] == {"offset": 1, "limit": 1, "total_count": 3}
    names = (await api.get(SAVED)).json()["metrics"]
    assert names[0] == "env/reward/total"


async def test_what_was_saved_by_an_earlier_version_or_of_a_forgotten_run_has_no_step(
    api, services, three_saves
):
    async with services.database.transaction() as db:
        await db.execute(update(CheckpointRow).where(CheckpointRow.name == "late").values(seq_id=None))
    assert (await listed(api))["late"] == (None, None, None, None)
    async with services.database.transaction() as db:
        await db.execute(delete(RunMetrics))
    assert await listed(api, limit=2) == dict.fromkeys(("late", "early"), (None, None, None, None))


async def best(api, run_id):
    answer = (await api.get(f"training_runs/{run_id}/checkpoints")).raise_for_status().json()
    return [each["checkpoint_id"] for each in answer["checkpoints"] if each["best"]]


async def test_the_mark_of_the_best_moves_is_recorded_and_survives_a_restart_and_the_loss_of_rows(
    api, services, three_saves
):
    address = f"training_runs/{three_saves}/checkpoints/weights"
    for name in ("early", "late", "late"):
        (await api.post(f"{address}/{name}/best")).raise_for_status()
    assert await best(api, three_saves) == ["weights/late"]
    async with services.database.transaction() as db:
        await db.execute(delete(CheckpointRow))
    folder = services.config.checkpoints_dir
    await open_checkpoints(services.database, LocalStore(folder), DiskGuard(folder))
    assert await best(api, three_saves) == ["weights/late"]
    assert (await listed(api))["late"][0] == 2
    (await api.delete(f"{address}/late/best")).raise_for_status()
    assert await best(api, three_saves) == []
    events = [each["event"] for each in (await api.get("audit")).json()["entries"]]
    assert events.count("checkpoint_marked_best") == 3
    assert events.count("checkpoint_unmarked_best") == 1


async def test_an_overwritten_checkpoint_is_the_best_no_more(api, three_saves):
    (await api.post(f"training_runs/{three_saves}/checkpoints/weights/late/best")).raise_for_status()
    await save(api, three_saves, "late", seq_id=13, overwrite=True)
    assert await best(api, three_saves) == []


async def test_only_who_may_change_a_checkpoint_marks_it_and_only_who_sees_it_lists_it(client_for):
    alice, mallory = await client_for("alice"), await client_for("mallory")
    reader = await client_for("alice", role="read-only")
    session = (await alice.post("create_session", json={})).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "Qwen/Qwen3-0.6B"}
    run = (await alice.post("create_model", json=body | {"lora_config": {"rank": 8}})).json()["model_id"]
    await save(alice, run, "mine")
    address = f"training_runs/{run}/checkpoints/weights/mine/best"
    assert (await mallory.post(address)).status_code == 404
    assert (await reader.post(address)).status_code == 403
    assert (await alice.post(address)).status_code == 200
    assert await listed(mallory) == {}
    assert list(await listed(reader)) == ["mine"]


@pytest.mark.parametrize("query", [{"metric": "x" * 201}, {"run": "a\0"}, {"metrik": "a"}])
async def test_an_odd_query_is_refused(api, query):
    assert (await api.get(SAVED, params=query)).status_code == 400
