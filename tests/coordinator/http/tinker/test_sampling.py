import msgspec
import pytest

from spmd_tx.coordinator.wire.sampling import SampleRequest

BASE_MODEL = "Qwen/Qwen3-0.6B"


@pytest.fixture
async def sampler_id(api, session_id):
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    return (await api.post("create_sampling_session", json=body)).json()["sampling_session_id"]


def sample(sampler_id, **changes):
    body = {
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "sampling_params": {
            "max_tokens": 4,
            "seed": 1,
            "stop": ["\n"],
            "temperature": 0.7,
            "top_k": -1,
            "top_p": 1.0,
        },
        "sampling_session_id": sampler_id,
        "seq_id": 0,
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
        "type": "sample",
    }
    return body | changes


async def save_sampler(api, model_id, name, seq_id=1):
    body = {"model_id": model_id, "path": name, "seq_id": seq_id, "kind": "snapshot"}
    future = (await api.post("save_weights_for_sampler", json=body)).json()
    return (await api.post("retrieve_future", json={"request_id": future["request_id"]})).json()["path"]


async def test_samplers_are_named_after_their_session_and_number(sampler_id, session_id):
    assert sampler_id == f"{session_id}:sample:0"


async def test_creating_a_sampler_again_is_the_same_sampler(api, session_id, sampler_id):
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
    assert (await api.post("create_sampling_session", json=body)).json()["sampling_session_id"] == sampler_id


async def test_a_sampler_of_a_checkpoint_tells_its_path_and_model(api, session_id, model_id):
    path = await save_sampler(api, model_id, "s1")
    body = {"session_id": session_id, "sampling_session_seq_id": 1, "model_path": path, "base_model": None}
    sampler_id = (await api.post("create_sampling_session", json=body)).json()["sampling_session_id"]
    assert (await api.get(f"samplers/{sampler_id}")).json() == {
        "sampler_id": sampler_id,
        "base_model": BASE_MODEL,
        "model_path": path,
    }


@pytest.mark.parametrize(
    "changes, status, complaint",
    [
        ({"model_path": "tinker://r/sampler_weights/gone"}, 404, "does not exist"),
        ({"model_path": "tinker://r/weights/w"}, 400, "save_weights_for_sampler"),
        ({"model_path": "s1"}, 400, "tinker://"),
        ({"base_model": "meta/unknown"}, 400, BASE_MODEL),
        ({}, 400, "model_path"),
        ({"session_id": "nobody", "base_model": BASE_MODEL}, 404, "nobody"),
    ],
)
async def test_a_sampler_of_nothing_is_refused(api, session_id, changes, status, complaint):
    body = {"session_id": session_id, "sampling_session_seq_id": 0} | changes
    response = await api.post("create_sampling_session", json=body)
    assert response.status_code == status
    assert complaint in response.json()["detail"]


async def test_a_sample_is_queued_with_an_id_for_each_sequence(api, sampler_id, services):
    answer = (await api.post("asample", json=sample(sampler_id))).json()
    assert answer["sample_sequence_ids"] == [f"{answer['request_id']}:{place}" for place in (0, 1)]
    (request,) = services.scheduler.arrived
    assert (request.kind, request.line) == ("sample", sampler_id)


async def test_the_scheduler_is_told_what_to_sample_from(api, session_id, model_id, sampler_id, services):
    path = await save_sampler(api, model_id, "s1")
    named = {"session_id": session_id, "sampling_session_seq_id": 1, "model_path": path}
    fused = {"model_id": model_id, "sampling_session_seq_id": 2, "seq_id": 2, "kind": "snapshot"}
    await api.post("create_sampling_session", json=named)
    future = (await api.post("save_weights_for_sampler", json=fused)).json()
    await api.post("retrieve_future", json={"request_id": future["request_id"]})
    told = []
    for number in range(3):
        await api.post("asample", json=sample(f"{session_id}:sample:{number}"))
        payload = await services.queue.payload(services.scheduler.arrived[-1])
        request = msgspec.json.decode(payload, type=SampleRequest)
        told.append((request.base_model, request.model_path))
    assert told == [(BASE_MODEL, None), (None, path), (None, None)]


async def test_a_sample_posted_twice_is_one_sample(api, sampler_id, services):
    first, second = [(await api.post("asample", json=sample(sampler_id))).json() for _ in range(2)]
    assert first == second
    assert len(services.scheduler.arrived) == 1


async def test_old_clients_send_chunks_without_a_type_and_nulls(api, sampler_id):
    body = sample(
        sampler_id,
        prompt={"chunks": [{"tokens": [1, 2]}]},
        sampling_params={"max_tokens": 2, "seed": None, "stop": None},
        base_model=None,
        model_path=None,
        prompt_logprobs=None,
    )
    assert (await api.post("asample", json=body)).status_code == 200


@pytest.mark.parametrize(
    "changes, complaint",
    [
        ({"prompt": {"chunks": []}}, "the prompt is empty"),
        ({"prompt": {"chunks": [{"tokens": [600]}]}}, "600"),
        ({"prompt": {"chunks": [{"tokens": list(range(128))}]}}, "too long"),
        ({"prompt": {"chunks": [{"type": "image", "data": "aaaa", "format": "png"}]}}, "image"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"sampling_params": {"max_tokens": 1000}}, "max_tokens 1000"),
        ({"sampling_params": {"temperature": -1}}, "temperature is -1"),
        ({"sampling_session_id": None, "base_model": BASE_MODEL}, "sampling_session_id"),
        ({"seq_id": -1}, "seq_id"),
    ],
)
async def test_what_cannot_be_sampled_is_refused_at_once(api, sampler_id, services, changes, complaint):
    response = await api.post("asample", json=sample(sampler_id, **changes))
    assert response.status_code == 400
    assert complaint in response.json()["detail"]
    assert services.scheduler.arrived == []


@pytest.mark.parametrize(
    "body, complaint",
    [
        (b"{", "no valid JSON"),
        (b"", "it has no body; send a JSON object"),
        (b'{"prompt": 3}', "prompt: Expected `object`, got `int`"),
    ],
)
async def test_json_that_does_not_fit_names_the_place(api, body, complaint):
    response = await api.post("asample", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert complaint in response.json()["detail"]


async def test_an_unknown_sampler_is_not_found(api):
    assert (await api.post("asample", json=sample("s:sample:9"))).status_code == 404
    assert (await api.get("samplers/s:sample:9")).status_code == 404


async def test_a_finished_session_takes_no_samples(api, session_id, sampler_id):
    await api.post(f"sessions/{session_id}/finish", json={"reason": {"type": "success"}})
    response = await api.post("asample", json=sample(sampler_id))
    assert response.status_code == 400
    assert "has ended" in response.json()["detail"]


async def test_clone_numbers_above_32_bits_are_taken(api, sampler_id):
    assert (await api.post("asample", json=sample(sampler_id, seq_id=7_000_000_000))).status_code == 200
