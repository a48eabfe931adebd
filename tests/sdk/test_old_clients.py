"""Requests as SDKs before 0.25 send them, recorded from 0.6.3 and 0.18.2; make sdk-matrix runs the SDKs."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import httpx
import numpy as np
import pytest

from tests.sdk.examples import ADAM_STEP, SECONDS, datum, logprobs_of, random_tokens, supervised
from tests.sdk.server import BASE_MODEL

TOKENS = [random_tokens(12, seed=0), random_tokens(7, seed=1)]
PROMPT = TOKENS[0][:6]


@dataclass
class OldClient:
    """What is sent by one of them. ``is_explicit``: with types and defaults, and without nulls."""

    http: httpx.Client
    is_explicit: bool
    session_id: str = ""
    model_id: str = ""
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def post(self, path: str, body: dict, **defaults: object) -> dict:
        """The recorded body: what was set, with defaults or nulls as this release adds them."""
        added = {k: v for k, v in defaults.items() if (v is not None) == self.is_explicit}
        return self.http.post(path, json=body | added).raise_for_status().json()

    def result(self, answer: dict) -> dict:
        body = {"request_id": answer["request_id"]} | self.if_explicit(allow_metadata_only=True)
        while (polled := self.http.post("retrieve_future", json=body)).status_code == 408:
            pass
        assert polled.headers["content-type"] == "application/json"
        return polled.raise_for_status().json()

    def if_explicit(self, **fields: object) -> dict:
        return fields if self.is_explicit else {}

    def text(self, tokens: list[int]) -> dict:
        return {"chunks": [{"tokens": tokens} | self.if_explicit(type="encoded_text")]}

    def open(self) -> None:
        if self.is_explicit:
            assert self.post("client/config", {"sdk_version": "0.18.2"})["pjwt_auth_enabled"] is False
        session = {"tags": [], "user_metadata": {}, "sdk_version": "0.6.3"}
        self.session_id = self.post("create_session", session, type="create_session")["session_id"]

    def create(self, seq_id: int, seed: int = 1) -> str:
        lora = {"rank": 8, "seed": seed, "train_unembed": True, "train_mlp": True, "train_attn": True}
        body = {"session_id": self.session_id, "model_seq_id": seq_id, "base_model": BASE_MODEL}
        body["lora_config"] = lora
        created = self.result(self.post("create_model", body, user_metadata=None, type="create_model"))
        assert created["type"] == "create_model"
        return created["model_id"]

    def loss(self, path: str, loss_fn: str, inputs: list[dict], config: dict | None = None) -> dict:
        data = [
            {"loss_fn_inputs": each, "model_input": self.text(tokens[:-1])}
            for tokens, each in zip(TOKENS, inputs, strict=True)
        ]
        loss = {"data": data, "loss_fn": loss_fn}
        if config is not None or not self.is_explicit:
            loss["loss_fn_config"] = config
        body = {f"{path}_input": loss, "model_id": self.model_id, "seq_id": next(self.numbers)}
        return self.result(self.post(path, body))

    def step(self) -> dict:
        adam = {"learning_rate": 0.01} | self.if_explicit(
            beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0
        )
        body = {"adam_params": adam, "model_id": self.model_id, "seq_id": next(self.numbers)}
        return self.result(self.post("optim_step", body, type="optim_step"))

    def sample(self, sampler_id: str, **more: object) -> dict:
        params = {"max_tokens": 4, "seed": 5, "stop": [], "temperature": 1.0}
        body = {
            "num_samples": 2,
            "prompt": self.text(PROMPT),
            "sampling_params": params | self.if_explicit(top_k=-1, top_p=1.0),
            "sampling_session_id": sampler_id,
            "seq_id": 0,
            "prompt_logprobs": False,
            "topk_prompt_logprobs": 0,
        } | more
        return self.result(self.post("asample", body, type="sample", base_model=None, model_path=None))


@pytest.fixture(params=[False, True], ids=["0.6.3", "0.18.2"])
def old(live_server, request) -> Iterator[OldClient]:
    headers = {"accept": "application/json", "x-api-key": "tml-test"}
    with httpx.Client(base_url=f"{live_server.url}/api/v1/", headers=headers, timeout=SECONDS) as http:
        client = OldClient(http, request.param)
        client.open()
        yield client
        http.post(f"sessions/{client.session_id}/finish", json={})  # they never do, but others need the slots


def values(numbers: list, dtype: str = "float32") -> dict:
    return {"data": numbers, "dtype": dtype, "shape": [len(numbers)]}


def supervised_inputs(weight: float = 1.0) -> list[dict]:
    return [
        {"target_tokens": values(each[1:], "int64"), "weights": values([weight] * (len(each) - 1))}
        for each in TOKENS
    ]


def logprobs_in(result: dict) -> np.ndarray:
    return np.concatenate([each["logprobs"]["data"] for each in result["loss_fn_outputs"]])


def test_an_old_client_trains_as_a_new_one(old, new_trainer):
    old.model_id = old.create(0)
    trainer = new_trainer()
    data = [supervised(tokens) for tokens in TOKENS]
    first = old.loss("forward", "cross_entropy", supervised_inputs())
    np.testing.assert_array_equal(logprobs_in(first), logprobs_of(trainer, data))
    assert [each["logprobs"]["shape"] for each in first["loss_fn_outputs"]] == [[11], [6]]
    backward = old.loss("forward_backward", "cross_entropy", supervised_inputs())
    assert backward["metrics"] == pytest.approx(first["metrics"], rel=1e-6)  # they are two programs
    before = [each["logprobs"]["data"] for each in first["loss_fn_outputs"]]
    reinforced = [
        {
            "target_tokens": values(tokens[1:], "int64"),
            "logprobs": values([value - 0.3 for value in logprobs]),
            "advantages": values([-1.0] * len(logprobs)),
        }
        for tokens, logprobs in zip(TOKENS, before, strict=True)
    ]
    clip = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    ppo = old.loss("forward_backward", "ppo", reinforced, clip)
    assert ppo["metrics"]["loss:sum"] == pytest.approx(17 * np.exp(0.3), rel=1e-4)
    trainer.forward_backward(data, "cross_entropy")
    trainer.forward_backward(
        [
            datum(tokens[:-1], **{name: tensor["data"] for name, tensor in inputs.items()})
            for tokens, inputs in zip(TOKENS, reinforced, strict=True)
        ],
        "ppo",
        clip,
    )
    step = trainer.optim_step(ADAM_STEP).result(SECONDS)
    assert old.step()["metrics"] == step.metrics
    after = logprobs_in(old.loss("forward", "cross_entropy", supervised_inputs()))
    np.testing.assert_array_equal(after, logprobs_of(trainer, data))


def test_an_old_client_resumes_and_samples(old):
    old.model_id = old.create(0)
    old.loss("forward_backward", "cross_entropy", supervised_inputs())
    old.step()
    trained = logprobs_in(old.loss("forward", "cross_entropy", supervised_inputs()))
    save = {"model_id": old.model_id, "path": "old", "seq_id": next(old.numbers)}
    path = old.result(old.post("save_weights", save, type="save_weights", ttl_seconds=None))["path"]
    sampler = {"model_id": old.model_id, "path": "old", "seq_id": next(old.numbers)}
    saved = old.result(old.post("save_weights_for_sampler", sampler, type="save_weights_for_sampler"))
    info = old.post("weights_info", {"tinker_path": path})
    assert (info["base_model"], info["lora_rank"], info["is_lora"]) == (BASE_MODEL, 8, True)

    old.model_id, old.numbers = old.create(1, seed=2), count(1)
    load = {"model_id": old.model_id, "path": path, "optimizer": False, "seq_id": next(old.numbers)}
    assert old.result(old.post("load_weights", load, type="load_weights"))["type"] == "load_weights"
    resumed = logprobs_in(old.loss("forward", "cross_entropy", supervised_inputs()))
    np.testing.assert_array_equal(resumed, trained)

    session = {"session_id": old.session_id, "sampling_session_seq_id": 0, "model_path": saved["path"]}
    opened = old.post("create_sampling_session", session, type="create_sampling_session", base_model=None)
    drawn = old.sample(opened["sampling_session_id"], prompt_logprobs=True)
    assert drawn["type"] == "sample"
    assert [each["stop_reason"] for each in drawn["sequences"]] == ["length"] * 2
    assert [len(each["tokens"]) for each in drawn["sequences"]] == [4, 4]
    assert all(logprob < 0 for each in drawn["sequences"] for logprob in each["logprobs"])
    assert drawn["prompt_logprobs"][0] is None
    np.testing.assert_allclose(drawn["prompt_logprobs"][1:], trained[: len(PROMPT) - 1], atol=1e-4)


def test_bad_data_of_an_old_client_fails_its_future_alone(old):
    old.model_id = old.create(0)
    bad = supervised_inputs(weight=1.0)
    bad[1]["target_tokens"]["data"][0] = 99_999
    failed = old.loss("forward_backward", "cross_entropy", bad)
    assert failed["category"] == "user"
    assert "datum 1: target_tokens has 99999" in failed["error"]
    no_shape = {"model_id": old.model_id, "seq_id": next(old.numbers), "forward_input": {"data": "none"}}
    assert old.http.post("forward", json=no_shape).status_code == 400  # whose number is used up
    assert old.step()["metrics"]
