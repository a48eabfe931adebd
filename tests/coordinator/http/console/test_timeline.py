import pytest

from spmd_tx.coordinator.http.console import timeline
from tests.coordinator.conftest import running_group

BASE_MODEL = "Qwen/Qwen3-0.6B"


async def timing(api, model_id, **query):
    answer = await api.get(f"http://server/console/api/runs/{model_id}/timing", params=query)
    return answer.raise_for_status().json()


async def step(api, model_id, seq_id):
    body = {"model_id": model_id, "seq_id": seq_id, "adam_params": {"learning_rate": 1e-4}}
    future = (await api.post("optim_step", json=body)).raise_for_status().json()
    return future["request_id"]


async def finished_step(api, model_id, seq_id):
    request_id = await step(api, model_id, seq_id)
    await api.post("retrieve_future", json={"request_id": request_id})


async def sampler_of(api, session_id, seq_id, **weights):
    body = {"session_id": session_id, "sampling_session_seq_id": seq_id, **weights}
    answer = await api.post("create_sampling_session", json=body)
    return answer.raise_for_status().json()["sampling_session_id"]


async def sample(api, sampler):
    body = {
        "num_samples": 1,
        "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 4},
        "sampling_session_id": sampler,
        "seq_id": 1,
    }
    future = (await api.post("asample", json=body)).raise_for_status().json()
    await api.post("retrieve_future", json={"request_id": future["request_id"]})


async def test_a_run_has_the_stages_of_its_requests(api, model_id):
    await finished_step(api, model_id, 1)
    found = await timing(api, model_id)
    assert [(each["kind"], each["seq_id"], each["state"]) for each in found["requests"]] == [
        ("create_model", 0, "finished"),
        ("optim_step", 1, "finished"),
    ]
    for request in found["requests"]:
        names, begins, ends = zip(*request["stages"], strict=True)
        assert set(names) <= {"queued", "batched", "device", "encoded"}
        assert begins[1:] == ends[:-1]
    assert sum(share["seconds"] for share in found["shares"]) == pytest.approx(
        found["until"] - found["since"]
    )
    assert found["summary"].startswith("The run spent most of this time waiting for its client (")
    assert all(share["advice"] for share in found["shares"])


async def test_a_run_without_requests_gets_no_advice(api, services, model_id):
    await finished_step(api, model_id, 1)
    services.queue.recent._ended.clear()
    found = await timing(api, model_id)
    assert found["summary"] == "The run had no request at the server in this time."
    assert [(share["cause"], share["advice"]) for share in found["shares"]] == [("client", "")]


async def test_an_unfinished_request_says_why_it_waits(api, services, model_id):
    services.scheduler.is_paused = True
    await step(api, model_id, 1)
    *_, waiting = (await timing(api, model_id))["requests"]
    assert (waiting["state"], waiting["reason"]) == ("unfinished", "all adapters are in use")


async def test_a_run_waits_for_workers_to_start(api, services, model_id):
    services.health.groups[0].record.began(1, {}, [])
    services.health.groups[0].record.generations[0].began_at -= 60.0
    services.scheduler.is_paused = True
    await step(api, model_id, 1)
    services.queue.at_work()[0].times.accepted_at -= 60.0
    (share,) = (await timing(api, model_id))["shares"]
    assert share["cause"] == "restart"


async def test_a_run_does_not_wait_for_workers_of_other_base_models(api, services, model_id):
    teacher = running_group("teacher", "large")
    services.health.groups.append(teacher)
    services.health.groups[0].record.began(1, {}, [])
    services.health.groups[0].record.ready("1 x cpu", None)
    services.health.groups[0].record.generations[0].began_at -= 60.0
    services.health.groups[0].record.generations[0].ready_at -= 60.0
    teacher.record.began(2, {}, [])
    teacher.record.generations[0].began_at -= 60.0
    services.scheduler.is_paused = True
    await step(api, model_id, 1)
    services.queue.at_work()[0].times.accepted_at -= 60.0
    services.queue.recent.worked({("another session", "its sampler")}, 60.0, "teacher")
    found = await timing(api, model_id)
    assert [share["cause"] for share in found["shares"]] == ["server"]
    assert found["group"] == {"name": "main", "is_only": False, "state": "ready", "phase": "running"}


async def test_a_run_is_shown_with_the_group_that_trains_it(api, services, model_id):
    services.health.groups.insert(0, running_group("rollouts", role="sample"))
    assert (await timing(api, model_id))["group"]["name"] == "main"


async def test_samplers_count_but_for_those_of_other_models(api, session_id, model_id):
    lora = {"rank": 8}
    body = {"session_id": session_id, "model_seq_id": 1, "base_model": BASE_MODEL, "lora_config": lora}
    other = (await api.post("create_model", json=body)).json()["model_id"]
    save = await api.post("save_weights_for_sampler", json={"model_id": other, "path": "x", "seq_id": 1})
    await api.post("retrieve_future", json={"request_id": save.json()["request_id"]})
    of_base = await sampler_of(api, session_id, 0, base_model=BASE_MODEL)
    of_other = await sampler_of(api, session_id, 1, model_path=f"tinker://{other}/sampler_weights/x")
    for sampler in of_base, of_other:
        await sample(api, sampler)

    async def lines(model):
        return {each["line"] for each in (await timing(api, model))["requests"]}

    assert await lines(model_id) == {model_id, of_base}
    assert await lines(other) == {other, of_base, of_other}


async def test_a_long_list_is_cut(api, model_id, monkeypatch):
    monkeypatch.setattr(timeline, "MOST_SHOWN", 1)
    await finished_step(api, model_id, 1)
    found = await timing(api, model_id)
    assert ([each["seq_id"] for each in found["requests"]], found["is_cut"]) == ([1], True)
