"""What becomes of a training request when its replies are in: the outcomes that need no arrays."""

from collections.abc import Awaitable

import msgspec

from spmd_tx.coordinator import schemas
from spmd_tx.coordinator.json_bodies import json_result
from spmd_tx.coordinator.request_log import Failed, Outcome
from spmd_tx.protocol import Reply

NOT_FINITE = (
    "the optimizer step was not taken: the gradient, or the weights it leads to, are not finite. "
    "The accumulated gradient was cleared; weights and optimizer state are as before. Look for logprobs, "
    "advantages or weights of extreme size in the last forward_backward, or lower the learning rate"
)


async def outcome_of_step(reply: Awaitable[Reply]) -> Outcome:
    metrics = (await reply).metrics
    if not metrics["applied"]:
        return Failed(NOT_FINITE, "user", executed=True)
    return json_result(schemas.OptimStepResult({"unclipped_grad_l2:mean": metrics["grad_norm"]}))


async def written_after(reply: Awaitable[Reply], written: Awaitable[str | None]) -> str | None:
    await reply
    return await written


async def json_after(reply: Awaitable[Reply], result: msgspec.Struct) -> Outcome:
    await reply
    return json_result(result)
