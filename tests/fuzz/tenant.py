"""A tenant who sends single requests and learns how each ends."""

import itertools
import json
from typing import Any

import httpx
import numpy as np

from spmd_tx.coordinator.wire import tinker_pb2 as pb
from tests.fuzz.calls import API, BASE_MODEL, JSON, PROTOBUF

DONE, REFUSED, FAILED = "done", "refused", "failed"  # the last by a future of category user
TOKENS = [5, 6, 7]


class Tenant:
    """With a session, a new model for every request that trains, and a sampler of the base model."""

    def __init__(self, url: str, token: str) -> None:
        self.http = httpx.Client(base_url=url, headers={"x-api-key": token, "content-type": JSON}, timeout=60)
        self._numbers = itertools.count()
        self.requests: dict[str, str] = {}  # verdicts by id
        self.session = self.post("create_session", {"tags": []}).json()["session_id"]
        new = {"session_id": self.session, "base_model": BASE_MODEL}
        self.post("create_sampling_session", {**new, "sampling_session_seq_id": 0})

    def close(self) -> None:
        self.http.close()

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.http.post(API + path, content=json.dumps(body))

    def get(self, path: str) -> httpx.Response:
        return self.http.get(API + path)

    def number(self) -> int:
        """One that no request has had."""
        return next(self._numbers)

    def model(self) -> str:
        number = self.number()
        body = {"session_id": self.session, "model_seq_id": number, "base_model": BASE_MODEL}
        self.post("create_model", {**body, "lora_config": {"rank": 4, "seed": 1}}).raise_for_status()
        return f"{self.session}:train:{number}"

    def sample(
        self, tokens: list[int] = TOKENS, params: dict[str, Any] | None = None, **more: Any
    ) -> httpx.Response:
        body = {"sampling_session_id": f"{self.session}:sample:0", "seq_id": self.number()}
        prompt = {"chunks": [{"tokens": tokens}]}
        params = {"max_tokens": 3, "seed": 1, "stop": [], **(params or {})}
        return self.post("asample", {**body, "prompt": prompt, "sampling_params": params, **more})

    def train(self, targets: pb.Tensor, loss: str = "cross_entropy", **inputs: pb.Tensor) -> httpx.Response:
        return self.send(self.batch(targets, loss, **inputs))

    def batch(self, targets: pb.Tensor, loss: str, **inputs: pb.Tensor) -> pb.ForwardBackwardRequest:
        request = pb.ForwardBackwardRequest(model_id=self.model(), seq_id=1, loss_fn=loss)
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(TOKENS, "<i4").tobytes()
        for name, tensor in {"target_tokens": targets, **inputs}.items():
            datum.loss_fn_inputs[name].CopyFrom(tensor)
        return request

    def send(self, request: pb.ForwardBackwardRequest) -> httpx.Response:
        headers = {"content-type": PROTOBUF}
        return self.http.post(API + "forward_backward", content=request.SerializeToString(), headers=headers)

    def train_json(self, name: str = "forward", tokens: list[int] = TOKENS, **target: Any) -> httpx.Response:
        tensor = {"data": tokens, "dtype": "int64", "shape": [len(tokens)], **target}
        datum = {"model_input": {"chunks": [{"tokens": tokens}]}, "loss_fn_inputs": {"target_tokens": tensor}}
        loss = {"data": [datum], "loss_fn": "cross_entropy"}
        return self.post(name, {"model_id": self.model(), "seq_id": 1, f"{name}_input": loss})

    def verdict(self, answer: httpx.Response) -> str:
        """How a request ends; an answer of 500 and more is its own verdict."""
        if answer.status_code >= 500:
            return answer.text
        if answer.status_code >= 400:
            return REFUSED
        request_id = answer.json().get("request_id")
        if request_id is None:
            return DONE
        self.requests[request_id] = self.outcome(request_id)
        return self.requests[request_id]

    def outcome(self, request_id: str) -> str:
        while True:
            answer = self.post("retrieve_future", {"request_id": request_id})
            if answer.status_code != 408:
                break
        if answer.headers["content-type"].startswith(PROTOBUF) or "error" not in answer.json():
            return DONE if answer.status_code == 200 else answer.text
        return FAILED if answer.json()["category"] == "user" else answer.text


def tensor(shape: list[int], values: list[int] | None = None) -> pb.Tensor:
    values = TOKENS if values is None else values
    return pb.Tensor(dtype=pb.DTYPE_INT64, shape=shape, dense=np.array(values, "<i8").tobytes())


def sparse(shape: list[int], values: list[int], starts: list[int], columns: list[int]) -> pb.Tensor:
    values_bytes, starts_bytes, columns_bytes = (
        np.array(each, "<i8").tobytes() for each in (values, starts, columns)
    )
    csr = pb.SparseCsr(values=values_bytes, crow_indices=starts_bytes, col_indices=columns_bytes)
    return pb.Tensor(dtype=pb.DTYPE_INT64, shape=shape, sparse_csr=csr)
