"""Puts load on a server that is measured: create models, send requests, and wait for results."""

import asyncio
import json
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field

import numpy as np

from spmd_tx.coordinator.wire import tinker_pb2 as pb
from tools.bench.loopback_client import PROTOBUF, Connection, connect

DATUM_TOKENS = 1000
BYTES_PER_TOKEN = 16  # int32 token, int64 target, float32 weight
PROMPT = list(range(1, 17))


@dataclass
class Tenant:
    """Holds a session with a model and a sampler, and the numbers of its next requests."""

    url: str
    session_id: str
    model_id: str
    sampler_id: str
    next_training: int = 1
    next_sample: int = 1
    connections: list[Connection] = field(default_factory=list)

    async def forward(self, connection: Connection, body: bytes) -> None:
        """Send one request and wait for its result. ``body`` lacks the number."""
        number, self.next_training = self.next_training, self.next_training + 1
        body += pb.ForwardBackwardRequest(seq_id=number).SerializeToString()
        answer = await connection.post("forward_backward", body, PROTOBUF)
        assert answer.status == 200, answer
        await retrieve(connection, answer.json()["request_id"])

    async def sample(self, connection: Connection, max_tokens: int = 1) -> None:
        number, self.next_sample = self.next_sample, self.next_sample + 1
        future = await connection.call(
            "asample",
            sampling_session_id=self.sampler_id,
            seq_id=number,
            num_samples=1,
            prompt={"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
            sampling_params={"max_tokens": max_tokens},
        )
        await retrieve(connection, future["request_id"])


async def retrieve(connection: Connection, request_id: str) -> None:
    body = json.dumps({"request_id": request_id}).encode()
    while (answer := await connection.post("retrieve_future", body)).status == 408:
        pass
    assert answer.status == 200, answer
    assert b'"error"' not in answer.body, answer


async def open_tenant(url: str) -> Tenant:
    connection = await connect(url)
    session = (await connection.call("create_session", tags=[], sdk_version="0.38.0"))["session_id"]
    lora = {"rank": 4, "seed": 9}
    created = await connection.call(
        "create_model", session_id=session, model_seq_id=0, base_model="tiny", lora_config=lora
    )
    await retrieve(connection, created["request_id"])
    sampler = await connection.call(
        "create_sampling_session", session_id=session, sampling_session_seq_id=0, base_model="tiny"
    )
    connection.close()
    return Tenant(url, session, f"{session}:train:0", sampler["sampling_session_id"])


def forward_body(tenant: Tenant, *lengths: int, forward_only: bool = True) -> bytes:
    """Return a body without its number, to be appended: parts of a protobuf message may be joined."""
    request = pb.ForwardBackwardRequest(
        model_id=tenant.model_id, loss_fn="cross_entropy", forward_only=forward_only
    )
    for length in lengths:
        datum, tokens = request.data.add(), np.ones(length, np.int32)
        datum.model_input.add().encoded_text.tokens = tokens.tobytes()
        weights = np.ones(length, np.float32)
        inputs = {"target_tokens": tokens.astype(np.int64), "weights": weights}
        for name, values in inputs.items():
            dtype = pb.DTYPE_INT64 if values.dtype.kind == "i" else pb.DTYPE_FLOAT32
            tensor = pb.Tensor(dense=values.tobytes(), dtype=dtype, shape=values.shape)
            datum.loss_fn_inputs[name].CopyFrom(tensor)
    return request.SerializeToString()


async def timed(work: Awaitable[None]) -> float:
    """Return the milliseconds of a call."""
    began = time.perf_counter()
    await work
    return 1e3 * (time.perf_counter() - began)


async def streams(tenants: Sequence[Tenant], streams_each: int, requests: int, kind: str) -> list[float]:
    """Send requests in parallel streams; return the milliseconds from POST to result of each."""
    left, milliseconds = requests, list[float]()

    async def stream(tenant: Tenant) -> None:
        nonlocal left
        connection, body = await connect(tenant.url), forward_body(tenant, 1)
        while left > 0:
            left -= 1
            work = tenant.sample(connection) if kind == "sample" else tenant.forward(connection, body)
            milliseconds.append(await timed(work))
        connection.close()

    async with asyncio.TaskGroup() as group:
        for tenant in tenants:
            for _ in range(streams_each):
                group.create_task(stream(tenant))
    return milliseconds
