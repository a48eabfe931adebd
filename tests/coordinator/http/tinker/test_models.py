import msgspec
import pytest

from spmd_tx.coordinator.wire.training import CreateModelRequest


def create_model(session_id, **changes):
    body = {
        "session_id": session_id,
        "model_seq_id": 0,
        "base_model": "Qwen/Qwen3-0.6B",
        "user_metadata": {"a": "b"},
        "lora_config": {"rank": 8, "seed": 3, "train_unembed": True, "train_mlp": True, "train_attn": True},
        "optimizer_config": {"type": "adamw"},
        "type": "create_model",
    }
    return body | changes


async def test_a_model_is_named_after_its_session_and_number(api, session_id):
    response = await api.post("create_model", json=create_model(session_id, model_seq_id=2))
    assert response.json()["model_id"] == f"{session_id}:train:2"


async def test_its_creation_is_request_0_of_its_line(api, session_id, services):
    await api.post("create_model", json=create_model(session_id))
    (request,) = services.scheduler.arrived
    assert (request.kind, request.line, request.seq_id) == ("create_model", f"{session_id}:train:0", 0)
    payload = msgspec.json.decode(await services.queue.payload(request), type=CreateModelRequest)
    assert payload.lora_config.seed == 3


async def test_creating_it_again_is_the_same_model(api, session_id, services):
    first, second = [(await api.post("create_model", json=create_model(session_id))).json() for _ in range(2)]
    assert first == second
    assert len(services.scheduler.arrived) == 1


async def test_old_clients_send_the_rank_only(api, session_id):
    body = create_model(session_id, lora_config={"rank": 8}, user_metadata=None)
    del body["optimizer_config"], body["type"]
    assert (await api.post("create_model", json=body)).status_code == 200


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"base_model": "meta/unknown"}, "Qwen/Qwen3-0.6B"),
        ({"base_model": "Qwen/Qwen3-0.6B:peft:1000000"}, "contexts have 1 to "),
        ({"lora_config": {"rank": 0}}, "send a rank between 1 and 16"),
        ({"lora_config": {"rank": 17}}, "rank is 17; it must be between 1 and 16"),
        ({"lora_config": None}, "lora_config is missing"),
        ({"optimizer_config": {"type": "dimuon", "version": 2}}, "dimuon has version 1"),
        ({"optimizer_config": {"type": "lion"}}, "'lion'; this service has 'adamw' and 'dimuon'"),
        ({"lora_config": {"rank": "eight"}}, "rank"),
        ({"model_seq_id": -1}, "model_seq_id"),
    ],
)
async def test_what_cannot_be_created_is_refused_with_a_remedy(api, session_id, services, changes, complaint):
    response = await api.post("create_model", json=create_model(session_id, **changes))
    assert response.status_code == 400
    assert complaint in response.json()["detail"]
    assert response.json()["category"] == "user"
    assert services.scheduler.arrived == []


async def test_a_model_needs_a_session(api):
    response = await api.post("create_model", json=create_model("nobody"))
    assert response.status_code == 404


async def test_a_finished_session_takes_no_models(api, session_id):
    await api.post(f"sessions/{session_id}/finish", json={"reason": {"type": "success"}})
    response = await api.post("create_model", json=create_model(session_id))
    assert response.status_code == 400
    assert "has ended" in response.json()["detail"]


async def test_the_client_learns_its_tokenizer(api, model_id):
    response = await api.post("get_info", json={"model_id": model_id, "type": "get_info"})
    assert response.json() == {
        "type": "get_info",
        "model_id": model_id,
        "model_data": {
            "arch": "Qwen3ForCausalLM",
            "model_name": "Qwen/Qwen3-0.6B",
            "tokenizer_id": "Qwen/Qwen3-0.6B",
        },
        "model_name": "Qwen/Qwen3-0.6B",
        "lora_rank": 8,
        "is_lora": True,
        "optimizer_config": {"type": "adamw"},
    }


async def test_a_model_keeps_the_optimizer_that_it_was_created_with(api, session_id):
    config = {"type": "dimuon", "version": 1}
    created = (await api.post("create_model", json=create_model(session_id, optimizer_config=config))).json()
    info = (await api.post("get_info", json={"model_id": created["model_id"]})).json()
    assert info["optimizer_config"] == config


async def test_nothing_is_known_of_an_unknown_model(api):
    response = await api.post("get_info", json={"model_id": "s:train:9"})
    assert response.status_code == 404
    assert "s:train:9" in response.json()["detail"]


async def test_training_runs_are_listed_newest_first_with_a_cursor(api, session_id, model_id):
    await api.post("create_model", json=create_model(session_id, model_seq_id=1))
    listing = (await api.get("training_runs?limit=20&offset=0&access_scope=owned")).json()
    assert [run["training_run_id"] for run in listing["training_runs"]] == [f"{session_id}:train:1", model_id]
    assert listing["cursor"] == {"offset": 0, "limit": 20, "total_count": 2}


async def test_a_training_run_tells_of_its_model(api, session_id):
    await api.post("create_model", json=create_model(session_id))
    run = (await api.get(f"training_runs/{session_id}:train:0?access_scope=owned")).json()
    assert (run["base_model"], run["lora_rank"], run["is_lora"]) == ("Qwen/Qwen3-0.6B", 8, True)
    assert run["user_metadata"] == {"a": "b"}
    assert run["last_checkpoint"] is None


async def test_an_unknown_training_run_is_not_found(api):
    assert (await api.get("training_runs/nobody")).status_code == 404


async def test_a_variant_of_the_model_keeps_its_name(api, session_id):
    name = "Qwen/Qwen3-0.6B:peft:8"
    created = (await api.post("create_model", json=create_model(session_id, base_model=name))).json()
    info = (await api.post("get_info", json={"model_id": created["model_id"]})).json()
    assert info["model_name"] == info["model_data"]["model_name"] == name
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": name}
    sampler = (await api.post("create_sampling_session", json=body)).json()["sampling_session_id"]
    assert (await api.get(f"samplers/{sampler}")).json()["base_model"] == name
