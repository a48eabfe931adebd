import json

import numpy as np
import pytest
import zstandard

from spmd_tx.coordinator.requests.line_numbers import LineNumbers
from spmd_tx.coordinator.wire import tinker_pb2 as pb

PROTOBUF = {"content-type": "application/x-protobuf"}


def forward_backward(model_id, seq_id=1, forward_only=False, tokens=(1, 2, 3)):
    chunk = pb.Chunk(encoded_text=pb.EncodedTextChunk(tokens=np.asarray(tokens, np.int32).tobytes()))
    return pb.ForwardBackwardRequest(
        model_id=model_id,
        seq_id=seq_id,
        data=[pb.Datum(model_input=[chunk])],
        loss_fn="cross_entropy",
        forward_only=forward_only,
    ).SerializeToString()


async def post(api, body, **headers):
    return await api.post("forward_backward", content=body, headers=PROTOBUF | headers)


async def arrived(services):
    return [(request.kind, request.seq_id) for request in services.scheduler.arrived[1:]]


async def test_a_body_is_queued_as_it_is(api, model_id, services):
    body = forward_backward(model_id)
    response = await post(api, body)
    assert response.json()["model_id"] == model_id
    request = services.scheduler.arrived[-1]
    assert (request.kind, request.line, request.seq_id) == ("forward_backward", model_id, 1)
    assert request.id == response.json()["request_id"]
    assert await services.queue.payload(request) == body


async def test_a_compressed_body_is_unpacked(api, model_id, services):
    body = forward_backward(model_id, tokens=range(100_000))
    packed = zstandard.ZstdCompressor().compress(body)
    assert (await post(api, packed, **{"content-encoding": "zstd"})).status_code == 200
    assert await services.queue.payload(services.scheduler.arrived[-1]) == body


async def test_forward_only_is_a_kind_of_its_own(api, model_id, services):
    await post(api, forward_backward(model_id, forward_only=True))
    assert services.scheduler.arrived[-1].kind == "forward"


async def test_chunks_are_taken_in_any_order(api, model_id, services):
    for seq_id in (3, 2, 1):
        assert (await post(api, forward_backward(model_id, seq_id))).status_code == 200
    assert [request.seq_id for request in services.scheduler.arrived[1:]] == [3, 2, 1]


async def test_a_step_posted_twice_is_one_step(api, model_id, services):
    body = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": 1e-3}, "type": "optim_step"}
    first, second = [(await api.post("optim_step", json=body)).json() for _ in range(2)]
    assert first["request_id"] == second["request_id"]
    assert len(services.scheduler.arrived) == 2  # create_model and one step


async def test_data_errors_are_left_to_the_future(api, model_id):
    body = pb.ForwardBackwardRequest(model_id=model_id, seq_id=1, loss_fn="no such loss").SerializeToString()
    assert (await post(api, body)).status_code == 200


@pytest.mark.parametrize(
    "body, headers, complaint",
    [
        (b"\xff\xff", {}, "not a protobuf"),
        (b'{"forward_backward_input": {}}', {"content-type": "application/json"}, "field `data`"),
        (b"not zstd", {"content-encoding": "zstd"}, "not a zstd frame"),
        (zstandard.ZstdCompressor().compress(b"x" * 1000)[:-8], {"content-encoding": "zstd"}, "cut short"),
        (b"", {"content-encoding": "br"}, "send zstd"),
    ],
)
async def test_what_cannot_be_parsed_is_refused_with_a_reason(api, body, headers, complaint):
    response = await post(api, body, **headers)
    assert response.status_code == 400
    assert complaint in response.json()["detail"]


async def test_a_body_that_unpacks_without_end_is_refused(api, monkeypatch):
    monkeypatch.setattr("spmd_tx.coordinator.http.tinker.bodies.MAX_UNPACKED_BYTES", 4 << 20)
    bomb = zstandard.ZstdCompressor().compress(bytes(5 << 20))
    response = await post(api, bomb, **{"content-encoding": "zstd"})
    assert response.status_code == 400
    assert "more than 4 MiB" in response.json()["detail"]


async def test_too_large_a_body_is_refused_clearly(api):
    response = await post(api, bytes((64 << 20) + 1))
    assert response.status_code == 413
    assert "64 MiB" in response.json()["detail"]


async def test_an_unknown_model_is_not_found(api):
    response = await post(api, forward_backward("s:train:9"))
    assert response.status_code == 404
    assert response.json()["detail"] == response.json()["error"]
    step = {"model_id": "s:train:9", "seq_id": 1, "adam_params": {}}
    assert (await api.post("optim_step", json=step)).status_code == 404


async def test_a_request_without_a_number_is_refused(api, model_id):
    response = await post(api, forward_backward(model_id, seq_id=0))
    assert response.status_code == 400
    assert "numbered from 1" in response.json()["detail"]


@pytest.mark.parametrize(
    "body, complaint",
    [
        (b"", "optim_step"),
        (b"{", "truncated"),
        (b"[]", "Expected `object`"),
        (b'{"seq_id": 1}', "model_id"),
        (b'{"model_id": 3, "seq_id": 1}', "Expected `str`, got `int` - at `$.model_id`"),
        (b'{"model_id": "m", "seq_id": 0}', "seq_id"),
        (b'{"model_id": "m", "seq_id": 99999999999999999999}', "seq_id"),
        (
            json.dumps(
                {"model_id": "m", "seq_id": 1, "adam_params": {"learning_rate": float("nan")}}
            ).encode(),
            "JSON",
        ),
    ],
)
async def test_json_that_does_not_fit_names_the_place(api, body, complaint):
    headers = {"content-type": "application/json"}
    response = await api.post("optim_step", content=body, headers=headers)
    assert response.status_code == 400
    assert complaint in response.json()["detail"]
    assert response.json()["category"] == "user"


async def test_the_number_of_a_refused_request_is_used_up(api, model_id, services):
    step = {
        "model_id": model_id,
        "seq_id": 3,
        "adam_params": {"learning_rate": None},
    }  # NaN, as the SDK sends it
    response = await api.post("optim_step", json=step)
    assert response.status_code == 400
    assert "adam_params.learning_rate" in response.json()["detail"]
    assert services.scheduler.consumed == [(model_id, 3)]


async def test_fields_of_later_versions_are_taken_as_long_as_they_say_nothing(api, model_id):
    body = {"model_id": model_id, "seq_id": 1, "adam_params": {"invented_later": 0}, "also_new": {}}
    assert (await api.post("optim_step", json=body)).status_code == 200
    body["adam_params"]["invented_later"] = 1
    refused = await api.post("optim_step", json=body | {"seq_id": 2})
    assert refused.status_code == 400
    assert "invented_later" in refused.json()["detail"]


async def test_a_model_of_a_finished_session_fails_its_requests_through_the_future(
    api, model_id, session_id, services
):
    await api.post(f"sessions/{session_id}/finish", json={"reason": {"type": "success"}})
    response = await post(api, forward_backward(model_id))
    assert response.status_code == 200
    future = await api.post("retrieve_future", json={"request_id": response.json()["request_id"]})
    assert future.json()["category"] == "user"
    assert "has ended" in future.json()["error"]
    assert [request.kind for request in services.scheduler.arrived] == ["create_model"]


async def test_nothing_is_taken_while_the_server_ends(api, model_id, services):
    services.health.refusal = "it shuts down"
    response = await post(api, forward_backward(model_id))
    assert response.status_code == 503
    assert response.json() == {"detail": "it shuts down", "error": "it shuts down", "category": "server"}


async def test_requests_are_taken_while_the_workers_start(api, model_id, services):
    services.health.groups[0].ready = False
    assert (await post(api, forward_backward(model_id))).status_code == 200


async def step(api, model_id, seq_id):
    response = await api.post("optim_step", json={"model_id": model_id, "seq_id": seq_id, "adam_params": {}})
    assert response.status_code == 200
    return (await api.post("retrieve_future", json={"request_id": response.json()["request_id"]})).json()


@pytest.mark.parametrize("ahead", [1_000_001, 2**31, 2**63 - 2])
async def test_a_number_far_ahead_fails_through_the_future_and_reaches_no_line(
    api, model_id, services, ahead
):
    await step(api, model_id, 1)
    refused = await step(api, model_id, 1 + ahead)
    assert refused["category"] == "user"
    assert f"seq_id is {1 + ahead}, and {model_id} has got up to 1" in refused["error"]
    assert [request.seq_id for request in services.scheduler.arrived] == [0, 1]
    assert services.scheduler.consumed == []
    assert "error" not in await step(api, model_id, 2)


async def test_a_number_within_the_window_is_taken_and_moves_it(api, model_id):
    for seq_id in (1_000_000, 2_000_000, 3):
        assert "error" not in await step(api, model_id, seq_id)


async def test_after_a_restart_the_window_is_where_it_was(api, model_id, services):
    await step(api, model_id, 900_000)
    await step(api, model_id, 2**40)
    fresh = LineNumbers(services.database, services.config.bounds.seq_ids_ahead)
    assert await fresh.problem(model_id, 1_900_000) is None
    assert "has got up to 1900000" in (await fresh.problem(model_id, 2**40) or "")


async def test_the_place_of_a_line_is_read_once(api, model_id, services, monkeypatch):
    await step(api, model_id, 1)
    monkeypatch.setattr(services.database, "reading", None)
    assert await services.line_numbers.problem(model_id, 2) is None


@pytest.mark.parametrize("number", [-1, 0, 2**63, 10**400])
async def test_no_number_is_used_up_that_no_request_can_have(api, model_id, services, number):
    body = json.dumps({"model_id": model_id, "seq_id": number, "adam_params": 1})
    response = await api.post("optim_step", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert services.scheduler.consumed == []
