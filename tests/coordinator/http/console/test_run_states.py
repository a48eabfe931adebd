import pytest
from sqlalchemy import event

from spmd_tx.coordinator.http import shared_answers
from spmd_tx.coordinator.requests.records import Failed
from tests.coordinator.http.console.test_runs import run_id as run_id  # a fixture
from tests.coordinator.http.console.test_timeline import BASE_MODEL
from tests.coordinator.http.tinker.test_checkpoints import save
from tests.coordinator.requests.runs.test_run_metrics import settle


@pytest.fixture(autouse=True)
def no_run_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_answers, "KEPT_SECONDS", 0.0)


async def health(api, run_id):
    run = (await api.get(f"http://server/console/api/runs/{run_id}")).json()
    open_runs = (await api.get("http://server/console/api/open_runs")).json()["runs"]
    assert open_runs.get(run_id, run["health"])["state"] == run["health"]["state"]
    return run["health"] | {"is_open": run_id in open_runs}


async def test_a_run_says_how_it_is(api, services, run_id, session_id):
    assert (await health(api, run_id))["state"] == "running"
    services.scheduler.is_paused = True
    await api.post("optim_step", json={"model_id": run_id, "seq_id": 1, "adam_params": {}})
    found = await health(api, run_id)
    assert (found["state"], found["reason"], found["is_open"]) == ("waiting", "all adapters are in use", True)
    (group,) = services.health.groups
    group.ready, group.record.busy = False, "loading weights"
    assert (await health(api, run_id))["reason"].endswith("loading weights")
    services.catalog._last_seen[session_id] -= 20
    found = await health(api, run_id)
    assert (found["state"], found["reason"].split("for")[0]) == ("silent", "no heartbeat ")
    ending = {"reason": {"type": "errored"}, "detail": "KeyError: 'x'"}
    await api.post(f"sessions/{session_id}/finish", json=ending)
    found = await health(api, run_id)
    assert (found["state"], found["reason"], found["is_open"]) == ("errored", "KeyError: 'x'", False)


async def test_a_run_counts_its_failed_requests_and_says_why_the_last_one_failed(
    api, services, session_id, run_id
):
    services.scheduler.is_paused = True
    future = await api.post("optim_step", json={"model_id": run_id, "seq_id": 1, "adam_params": {}})
    request_id = future.json()["request_id"]
    assert (await health(api, run_id))["last_failure"] is None
    services.queue.resolve(request_id, Failed("no " * 1000, "server"))
    await api.post("retrieve_future", json={"request_id": request_id})
    assert (await health(api, run_id))["failed"] == 1
    await api.post(f"sessions/{session_id}/finish", json={"reason": {"type": "errored"}})
    failure = (await health(api, run_id))["last_failure"]
    assert failure.pop("at") > 0
    error = ("no " * 1000)[:500] + " …"
    assert failure == {
        "request_id": request_id,
        "kind": "optim_step",
        "category": "server",
        "error": error,
    }


async def test_open_runs_are_those_of_the_caller(client_for):
    alice, mallory = await client_for("alice"), await client_for("mallory")
    session = (await alice.post("create_session", json={})).json()["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
    run = (await alice.post("create_model", json=body)).json()["model_id"]
    assert list((await alice.get("http://server/console/api/open_runs")).json()["runs"]) == [run]
    assert (await mallory.get("http://server/console/api/open_runs")).json()["runs"] == {}


async def test_a_client_that_goes_without_a_word_has_left_if_all_its_steps_are_saved(
    api, services, session_id, run_id
):
    async def step(seq_id):
        await settle(services.database, (seq_id, "optim_step", {"norm": 1.0}), line=run_id)

    async def state():
        return (await health(api, run_id))["state"]

    await save(api, run_id, "fresh", seq_id=1)
    await step(2)
    services.catalog._last_seen[session_id] -= 20
    assert await state() == "silent"
    await save(api, run_id, "first", seq_id=3)
    services.catalog._last_seen[session_id] -= 20
    found = await health(api, run_id)
    assert (found["state"], found["reason"].partition(" s, ")[2]) == ("left", "all steps are saved")
    await step(4)
    assert await state() == "silent"
    await save(api, run_id, "second", seq_id=5)
    services.scheduler.is_paused = True
    await api.post("optim_step", json={"model_id": run_id, "seq_id": 6, "adam_params": {}})
    services.catalog._last_seen[session_id] -= 20
    assert await state() == "silent"  # in the middle of a request


@pytest.mark.parametrize(("is_saved", "state"), [(True, "left"), (False, "interrupted")])
async def test_a_run_whose_session_has_ended_without_a_word(
    api, services, session_id, run_id, is_saved, state
):
    await settle(services.database, (1, "optim_step", {"norm": 1.0}), line=run_id)
    if is_saved:
        await save(api, run_id, "last", seq_id=2)
    await services.catalog.end_session(session_id, "its client was silent for 1800 seconds")
    found = await health(api, run_id)
    assert found["state"] == state
    assert found["reason"].startswith("its client was silent for 1800 seconds")


async def test_however_many_runs_are_silent_their_steps_and_checkpoints_are_asked_for_once(
    api, services, session_id, run_id
):
    body = {"session_id": session_id, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
    others = [await api.post("create_model", json=body | {"model_seq_id": 1 + n}) for n in range(3)]
    unsaved, *saved = [answer.json()["model_id"] for answer in others]
    for line in (unsaved, *saved):
        await settle(services.database, (1, "optim_step", {"norm": 1.0}), line=line)
    for line in saved:
        await save(api, line, "last", seq_id=2)
    services.catalog._last_seen[session_id] -= 20
    statements = list[str]()
    event.listen(
        services.database._reader.sync_engine,
        "before_cursor_execute",
        lambda *each: statements.append(each[2]),
    )
    for route in ("open_runs", "runs"):
        statements.clear()
        answer = (await api.get(f"http://server/console/api/{route}")).json()["runs"]
        healths = answer if route == "open_runs" else {run["id"]: run["health"] for run in answer}
        states = {line: health["state"] for line, health in healths.items()}
        assert states == {run_id: "left", unsaved: "silent"} | dict.fromkeys(saved, "left")
        assert len([each for each in statements if "checkpoints" in each]) == 1
