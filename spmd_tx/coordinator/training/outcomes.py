"""Outcomes of training requests, made from the replies to their steps."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from spmd_tx.coordinator.checkpoints.writes import Writing, written_after
from spmd_tx.coordinator.requests.records import Failed, Finished, Outcome, json_result
from spmd_tx.coordinator.runtime.threads import compute
from spmd_tx.coordinator.sampling.versions import WriteOut
from spmd_tx.coordinator.tenancy.spent import Usage
from spmd_tx.coordinator.training.batching import ChunkOutput, PackedRequest
from spmd_tx.coordinator.training.loss_metrics import loss_metrics
from spmd_tx.coordinator.wire import training
from spmd_tx.coordinator.wire.training_protobuf import PROTOBUF, encode_forward_backward_output
from spmd_tx.errors import NotLoaded
from spmd_tx.protocol.reports import Reply

BYTES_PER_TOKEN = 8  # logprob and loss, in float32
NORM = "grad_norm"  # metrics of an OptimStep: of the whole gradient, and _GROUP of its parts

NOT_FINITE = (
    "the optimizer step was not taken: the gradient, or the weights it leads to, are not finite. "
    "The accumulated gradient was cleared; weights and optimizer state are as before. Look for logprobs, "
    "advantages or weights of extreme size in the last forward_backward, or lower the learning rate"
)


class Begun(NamedTuple):
    """Holds a request whose steps are ready to be sent."""

    outcome: Callable[[], Coroutine[Any, Any, Outcome]]  # to be run next; waits for the replies
    next_waits: bool = False  # whether the model's next request must wait for the outcome


@dataclass(frozen=True)
class Differentiated:
    """Holds a custom loss, its metrics and its gradient for the logprobs of a forward pass."""

    loss: float  # sum over datums
    metrics: dict[str, float]
    gradients: list[np.ndarray]  # per datum, float32, in the shape of its logprobs


async def outcome_of_loss(
    packed: PackedRequest,
    outputs: Sequence[Awaitable[ChunkOutput]],
    layout: str,
    custom: Differentiated | None = None,
) -> Outcome:
    """Make the outcome of a forward or backward pass.

    With a ``custom`` loss, the loss of the backward pass is the surrogate loss, as in the SDK.
    """
    received = [await output for output in outputs]

    def encode() -> tuple[bytes, dict[str, float]]:
        results = packed.results(received)
        metrics = {
            "loss:sum": results.loss,
            "num_tokens:sum": float(packed.destination.size),
            "num_datums:sum": float(len(results.logprobs)),
        }
        if custom is None:
            metrics |= loss_metrics(packed, results.logprobs)
            return encode_forward_backward_output(results.logprobs, metrics, results.losses), metrics
        metrics |= custom.metrics | {"loss:sum": custom.loss}
        if not packed.chunks[0].forward_only:
            metrics["surrogate_loss:sum"] = results.loss
        return encode_forward_backward_output(results.logprobs, metrics), metrics

    tokens = packed.destination.size
    body, metrics = await compute(BYTES_PER_TOKEN * tokens, encode)
    if packed.chunks[0].forward_only:
        return Finished(PROTOBUF, body, layout, spent=Usage(forwarded=tokens))
    spent = Usage(trained=tokens, forwarded=0 if custom is None else tokens)
    return Finished(PROTOBUF, body, layout, spent=spent, metrics=metrics, rollouts=packed.learned)


async def outcome_of_step(learning_rate: float, reply: Awaitable[Reply]) -> Outcome:
    metrics = (await reply).metrics
    if not metrics["applied"]:
        return Failed(NOT_FINITE, "user", executed=True)
    step_metrics = {
        f"unclipped_grad_l2{name.removeprefix(NORM)}:mean": value
        for name, value in metrics.items()
        if name.startswith(NORM)
    } | {"learning_rate:mean": learning_rate}
    return replace(json_result(training.OptimStepResult(step_metrics)), metrics=step_metrics)


def check_loaded(reply: Reply) -> None:
    """Raise NotLoaded if the workers refused a folder."""
    if reply.refusal is not None:
        raise NotLoaded(f"the weights were not loaded: {reply.refusal}", is_damage=reply.is_damage)


async def at_once(outcome: Outcome) -> Outcome:
    """Return a known outcome."""
    return outcome


async def json_after(reply: Awaitable[Reply], result: msgspec.Struct) -> Outcome:
    await reply
    return json_result(result)


async def all_written(reply: asyncio.Future[Reply], written_out: WriteOut, writing: Writing) -> str | None:
    """Wait for a snapshot and for the versions that go with it; return why one could not be written."""
    problem = await written_after(reply, writing)
    of_versions = await written_out.problem()
    return problem or of_versions


async def closing(held: ExitStack, outcome: Callable[[], Coroutine[Any, Any, Outcome]]) -> Outcome:
    """Return the outcome, and release what the request held."""
    with held:
        return await outcome()
