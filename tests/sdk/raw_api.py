"""Calls the HTTP API without the SDK, to send requests twice, out of order, or damaged."""

from collections.abc import Sequence

import httpx
import numpy as np
from tinker import types

from spmd_tx.coordinator.wire import tinker_pb2 as pb

PROTOBUF = "application/x-protobuf"
SECONDS = 60


class RawApi:
    """Holds a client with its own session."""

    def __init__(self, url: str, base_model: str) -> None:
        self.http = httpx.Client(base_url=f"{url}/api/v1/", timeout=SECONDS)
        self.base_model = base_model
        self.session_id = self.post("create_session", tags=[], sdk_version="0.38.0")["session_id"]

    def close(self) -> None:
        self.post(f"sessions/{self.session_id}/finish", reason={"type": "success"}, detail=None)
        self.http.close()

    def post(self, path: str, /, **body: object) -> dict:
        return self.http.post(path, json=body).raise_for_status().json()

    def create_model(self, number: int, **lora: object) -> str:
        """Create a model and wait until it is there."""
        lora = {"rank": 4, "seed": 1, **lora}
        answer = self.post("create_model", **self.model_body(number), lora_config=lora)
        assert self.retrieve(answer["request_id"]).json().get("error") is None
        return answer["model_id"]

    def model_body(self, number: int) -> dict:
        return {"session_id": self.session_id, "model_seq_id": number, "base_model": self.base_model}

    def forward_backward(
        self, model_id: str, seq_id: int, data: Sequence[types.Datum], forward_only: bool = False
    ) -> str:
        request = pb.ForwardBackwardRequest(
            model_id=model_id,
            seq_id=seq_id,
            data=[_message(datum) for datum in data],
            loss_fn="cross_entropy",
            forward_only=forward_only,
        )
        return self.post_bytes("forward_backward", request.SerializeToString(), PROTOBUF).json()["request_id"]

    def post_bytes(self, path: str, body: bytes, content_type: str) -> httpx.Response:
        return self.http.post(path, content=body, headers={"content-type": content_type})

    def optim_step(self, model_id: str, seq_id: int, learning_rate: float = 0.01) -> str:
        adam = {"learning_rate": learning_rate}
        return self.post("optim_step", model_id=model_id, seq_id=seq_id, adam_params=adam)["request_id"]

    def create_sampler(self, number: int = 0) -> str:
        return self.post(
            "create_sampling_session",
            session_id=self.session_id,
            sampling_session_seq_id=number,
            base_model=self.base_model,
        )["sampling_session_id"]

    def sample(
        self, sampler_id: str, seq_id: int, prompt: list[int], num_samples: int = 1, **params: object
    ) -> httpx.Response:
        return self.http.post(
            "asample",
            json={
                "sampling_session_id": sampler_id,
                "seq_id": seq_id,
                "num_samples": num_samples,
                "prompt": {"chunks": [{"tokens": prompt, "type": "encoded_text"}]},
                "sampling_params": params,
            },
        )

    def retrieve(self, request_id: str) -> httpx.Response:
        while True:
            answer = self.http.post("retrieve_future", json={"request_id": request_id})
            if answer.status_code != 408:
                return answer

    def logprobs(self, model_id: str, seq_id: int, data: Sequence[types.Datum]) -> np.ndarray:
        """Return the log-probabilities of all targets, end to end."""
        answer = self.retrieve(self.forward_backward(model_id, seq_id, data, forward_only=True))
        output = pb.ForwardBackwardOutput.FromString(answer.content)
        return np.frombuffer(output.loss_fn_outputs[0].fields["logprobs"].data, "<f4")


def _message(datum: types.Datum) -> pb.Datum:
    message = pb.Datum()
    message.model_input.add().encoded_text.tokens = np.array(datum.model_input.to_ints(), "<i4").tobytes()
    for name, values in datum.loss_fn_inputs.items():
        array = values.to_numpy()
        tensor = message.loss_fn_inputs[name]
        tensor.dense = array.tobytes()
        tensor.dtype = pb.DTYPE_INT64 if array.dtype.kind == "i" else pb.DTYPE_FLOAT32
        tensor.shape.extend(array.shape)
    return message
