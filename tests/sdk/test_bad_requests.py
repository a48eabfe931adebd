"""Requests that the SDK does not make on purpose: sent twice, damaged, for nobody, or given up."""

import httpx
import pytest

from spmd_tx.coordinator.wire import tinker_pb2 as pb
from tests.sdk.examples import CONTEXT, batch, random_tokens
from tests.sdk.raw_api import PROTOBUF

DATA = batch(seed=0)
PROMPT = random_tokens(10, seed=0)
MANY = 256  # samples, which take a server of 16 rows long
TO_THE_END = {"max_tokens": CONTEXT - len(PROMPT), "stop": []}


def sampled(answer: httpx.Response) -> list[bytes]:
    return [sequence.tokens for sequence in pb.SampleResponse.FromString(answer.content).sequences]


@pytest.mark.parametrize(
    "path, body, content_type, words",
    [
        ("forward_backward", b"\xff not protobuf", PROTOBUF, "not a protobuf ForwardBackwardRequest"),
        ("forward_backward", b"", PROTOBUF, "model '' does not exist"),
        ("asample", b"{not json", "application/json", "no valid JSON"),
        ("asample", b'{"num_samples": "many"}', "application/json", "asample"),
        ("optim_step", b"[]", "application/json", "optim_step"),
        ("create_model", b"\xff", "application/json", "JSON"),
    ],
)
def test_what_does_not_parse_is_refused_with_words(api, path, body, content_type, words):
    answer = api.post_bytes(path, body, content_type)
    assert 400 <= answer.status_code < 500
    assert answer.status_code != 409
    assert answer.json()["category"] == "user"
    assert words in answer.json()["error"]


def test_damaged_compression_is_refused(api):
    headers = {"content-type": PROTOBUF, "content-encoding": "zstd"}
    answer = api.http.post("forward_backward", content=b"not zstd", headers=headers)
    assert (answer.status_code, answer.json()["category"]) == (400, "user")
    assert "zstd" in answer.json()["error"]


def test_unknown_ids_are_not_found_and_named(api):
    answers = {
        "S:train:9": api.http.post("optim_step", json={"model_id": "S:train:9", "seq_id": 1}),
        "S:sample:9": api.sample("S:sample:9", 0, PROMPT, max_tokens=1),
        "no-such-request": api.http.post("retrieve_future", json={"request_id": "no-such-request"}),
        "no-such-session": api.http.post("create_model", json=api.model_body(0) | {
            "session_id": "no-such-session", "lora_config": {"rank": 4},
        }),
    }  # fmt: skip
    for name, answer in answers.items():
        assert answer.status_code == 404
        assert name in answer.json()["error"]


def test_a_sample_that_is_sent_twice_is_drawn_once(api):
    sampler = api.create_sampler()
    first, second = (api.sample(sampler, 5, PROMPT, max_tokens=8).json() for _ in range(2))
    assert first == second
    assert api.sample(sampler, 6, PROMPT, max_tokens=8).json() != first
    drawn = sampled(api.retrieve(first["request_id"]))
    assert sampled(api.retrieve(first["request_id"])) == drawn


def test_a_model_that_is_created_twice_is_one_model(api):
    body = api.model_body(0) | {"lora_config": {"rank": 4, "seed": 1}}
    first, second = (api.post("create_model", **body) for _ in range(2))
    assert first == second
    slots_left = [api.post("create_model", **body) for _ in range(20)]
    assert slots_left == [first] * 20
    assert api.retrieve(first["request_id"]).json()["model_id"] == first["model_id"]
    other = api.create_model(1)
    assert other != first["model_id"]


def test_a_save_that_is_sent_twice_is_one_checkpoint(api):
    model = api.create_model(0)
    body = {"model_id": model, "seq_id": 1, "path": "twice"}
    first = api.post("save_weights", **body)
    path = api.retrieve(first["request_id"]).json()["path"]
    assert api.post("save_weights", **body) == first
    assert api.retrieve(first["request_id"]).json()["path"] == path
    listed = api.http.get(f"training_runs/{model}/checkpoints").json()["checkpoints"]
    assert [checkpoint["tinker_path"] for checkpoint in listed] == [path]


def test_cancelled_samples_are_over_and_make_room(api):
    sampler = api.create_sampler()
    crowd = [api.sample(sampler, n, PROMPT, MANY, **TO_THE_END).json()["request_id"] for n in range(4)]
    for request_id in crowd:
        api.post("cancel_future", request_id=request_id)
    answer = api.retrieve(api.sample(sampler, 99, PROMPT, max_tokens=4, stop=[]).json()["request_id"])
    assert len(sampled(answer)) == 1
    for request_id in crowd:
        error = api.retrieve(request_id).json()
        assert error == {"error": "the sample was cancelled by its client", "category": "user"}


def test_a_number_that_was_refused_does_not_hold_up_the_line(api):
    model = api.create_model(0)
    refused = api.http.post("optim_step", json={"model_id": model, "seq_id": 1, "adam_params": "fast"})
    assert refused.status_code == 400
    api.forward_backward(model, 2, DATA)
    assert "metrics" in api.retrieve(api.optim_step(model, 3)).json()
