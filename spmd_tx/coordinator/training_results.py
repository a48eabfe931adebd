"""What forward and forward_backward answer: logprobs of every datum, and metrics."""

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

import numpy as np

from spmd_tx.coordinator.batching import ChunkOutput, PackedRequest
from spmd_tx.coordinator.offloading import compute
from spmd_tx.coordinator.request_queue import Finished, Outcome
from spmd_tx.coordinator.usage import Spent
from spmd_tx.coordinator.wire import PROTOBUF, encode_forward_backward_output

BYTES_PER_TOKEN = 8  # logprob and loss, in float32


@dataclass(frozen=True)
class Differentiated:
    """What a custom loss is for the logprobs of a forward pass."""

    loss: float  # sum over datums
    metrics: dict[str, float]
    gradients: list[np.ndarray]  # of each datum, float32, in the shape of its logprobs


async def of_loss(
    packed: PackedRequest,
    outputs: Sequence[Awaitable[ChunkOutput]],
    layout: str,
    custom: Differentiated | None = None,
) -> Outcome:
    """With a ``custom`` loss, that of the backward pass is called the surrogate, as by the SDK."""
    received = [await output for output in outputs]

    def encode() -> bytes:
        logprobs, loss = packed.results(received)
        metrics = {
            "loss:sum": loss,
            "num_tokens:sum": float(packed.destination.size),
            "num_datums:sum": float(len(logprobs)),
        }
        if custom is not None:
            metrics |= custom.metrics | {"loss:sum": custom.loss}
            if not packed.chunks[0].forward_only:
                metrics["surrogate_loss:sum"] = loss
        return encode_forward_backward_output(logprobs, metrics)

    tokens = packed.destination.size
    if packed.chunks[0].forward_only:
        spent = Spent(forwarded=tokens)
    else:
        spent = Spent(trained=tokens, forwarded=0 if custom is None else tokens)
    return Finished(PROTOBUF, await compute(BYTES_PER_TOKEN * tokens, encode), layout, spent=spent)
