"""forward_backward with a custom loss, in three steps: forward pass, loss of each datum, backward pass.

The loss is differentiated with respect to the logprobs of the forward pass. The backward pass is that of
cross_entropy with weights = -gradient, as in the SDK when it runs a loss itself.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from spmd_tx.coordinator.runtime.threads import SMALL_BYTES, compute
from spmd_tx.coordinator.training.batching import ChunkOutput, PackedRequest
from spmd_tx.coordinator.training.custom_loss_catalog import StoredLoss
from spmd_tx.coordinator.training.custom_loss_runs import LossArrays
from spmd_tx.coordinator.training.model import TrainedModel
from spmd_tx.coordinator.training.outcomes import Differentiated
from spmd_tx.coordinator.wire.training_protobuf import Datum, ForwardBackwardRequest
from spmd_tx.custom_loss.arguments import quoted
from spmd_tx.custom_loss.definition import LossInput
from spmd_tx.custom_loss.limits import LossLimits
from spmd_tx.errors import InvalidRequest
from spmd_tx.protocol.commands import CustomLoss

LOSS = "custom"

# Validates a cross_entropy request and packs it.
Pack = Callable[[ForwardBackwardRequest], PackedRequest]

# Runs the command that is made for a run's number.
RunLoss = Callable[[Callable[[int], CustomLoss]], Awaitable[LossArrays]]


def loss_id(request: ForwardBackwardRequest) -> str:
    """Return the id of the wanted loss. Raises InvalidRequest."""
    config = request.loss_config
    wanted = config.get("loss_id")
    if not isinstance(wanted, str) or len(config) > 1:
        raise InvalidRequest(
            "loss_fn 'custom' takes loss_fn_config with one key, loss_id: what create_custom_loss gave"
        )
    return wanted


async def differentiate(
    model: TrainedModel,
    request: ForwardBackwardRequest,
    stored: StoredLoss,
    pack: Pack,
    limits: LossLimits | None,
    run: RunLoss,
) -> tuple[PackedRequest, list[asyncio.Future[ChunkOutput]], Differentiated]:
    """Do the first two steps. Raises InvalidRequest when the loss cannot be run on these datums."""
    packed = await compute(SMALL_BYTES, _forward, request, stored, pack)
    waiting = model.put_chunks(packed.chunks)
    outputs = [await output for output in waiting]
    logprobs = (await compute(SMALL_BYTES, packed.results, outputs)).logprobs
    command = await compute(SMALL_BYTES, _command, request, stored, logprobs)
    arrays = await run(lambda number: msgspec.structs.replace(command, number=number, limits=limits))
    return packed, waiting, _differentiated(stored, logprobs, arrays)


def backward(request: ForwardBackwardRequest, differentiated: Differentiated, pack: Pack) -> PackedRequest:
    """Pack the request of the third step."""
    weights = [-gradient for gradient in differentiated.gradients]
    return pack(_as_cross_entropy(request, weights, forward_only=False))


def _forward(request: ForwardBackwardRequest, stored: StoredLoss, pack: Pack) -> PackedRequest:
    """Validate the request, with the inputs of the loss, and pack the forward pass."""
    targets = [datum.loss_inputs.get("target_tokens", np.zeros(0)) for datum in request.data]
    weights = [np.zeros(target.shape, np.float32) for target in targets]
    packed = pack(_as_cross_entropy(request, weights, forward_only=True))
    for index, datum in enumerate(request.data):
        for each in stored.loss.inputs:
            problem = _input_problem(datum, each, stored.loss.name)
            if problem:
                raise InvalidRequest(f"datum {index}: {problem}")
    return packed


def _as_cross_entropy(
    request: ForwardBackwardRequest, weights: Sequence[np.ndarray], forward_only: bool
) -> ForwardBackwardRequest:
    """Return a cross_entropy request with the same tokens and targets and with these weights."""
    data = []
    for datum, its_weights in zip(request.data, weights, strict=True):
        kept = {key: values for key, values in datum.loss_inputs.items() if key == "target_tokens"}
        data.append(replace(datum, loss_inputs=kept | {"weights": its_weights}))
    return replace(request, data=data, loss_fn="cross_entropy", loss_config={}, forward_only=forward_only)


def _input_problem(datum: Datum, wanted: LossInput, loss: str) -> str | None:
    """Say what is wrong with one input of a datum, whose tokens and targets are valid."""
    key = "target_tokens" if wanted.name == "logprobs" else wanted.name
    values, tokens = datum.loss_inputs.get(key), len(datum.tokens)
    if values is None:
        return f"loss_fn_inputs lacks {key}, which loss {quoted(loss)} takes"
    shape = list(values.shape)
    expected = {0: "one number", 1: f"[{tokens}], one value per token", 2: f"[{tokens}, K]"}[wanted.rank]
    fits = values.size == 1 if wanted.rank == 0 else values.ndim == wanted.rank and shape[0] == tokens
    if not fits or (wanted.rank == 2 and not shape[1]):
        return (
            f"{key} has the shape {shape}, but loss {quoted(loss)} takes {wanted.name} "
            f"with rank {wanted.rank}: {expected}"
        )
    return None


def _command(
    request: ForwardBackwardRequest, stored: StoredLoss, logprobs: Sequence[np.ndarray]
) -> CustomLoss:
    """Build the command: values of each input end to end, in datum order. Its number is set later."""
    columns = [[np.asarray(each, np.float32) for each in logprobs]]
    for each in stored.loss.inputs[1:]:
        values = [datum.loss_inputs[each.name] for datum in request.data]
        columns.append([array.reshape(()) if each.rank == 0 else array for array in values])
    widths = [[array.shape[1] if array.ndim == 2 else 0 for array in column] for column in columns]
    return CustomLoss(
        number=0,
        tenant=stored.tenant,
        definition=stored.definition,
        lengths=np.array([len(datum.tokens) for datum in request.data], np.int32),
        widths=np.array(widths, np.int32),
        values=[_end_to_end(column) for column in columns],
    )


def _end_to_end(column: Sequence[np.ndarray]) -> np.ndarray:
    """Join values of all datums as float32, or as int64 if all datums send integers."""
    dtype = np.int64 if all(array.dtype.kind == "i" for array in column) else np.float32
    return np.concatenate([array.ravel() for array in column]).astype(dtype, copy=False)


def _differentiated(stored: StoredLoss, logprobs: Sequence[np.ndarray], arrays: LossArrays) -> Differentiated:
    losses, metrics = arrays["losses"], arrays["metrics"]
    sizes = [array.size for array in logprobs]
    pieces = np.split(arrays["gradients"], np.cumsum(sizes)[:-1])
    gradients = [piece.reshape(array.shape) for piece, array in zip(pieces, logprobs, strict=True)]
    for index, (loss, gradient) in enumerate(zip(losses, gradients, strict=True)):
        if not math.isfinite(loss) or not np.isfinite(gradient).all():
            what = f"is {loss}" if not math.isfinite(loss) else "has a gradient that is not finite"
            raise InvalidRequest(
                f"datum {index}: loss {quoted(stored.loss.name)} {what}; nothing was added to the "
                "model's gradient. Look for logarithms, roots or quotients of 0, and for indices out of range"
            )
    reduced = {}
    for place, name in enumerate(stored.loss.metric_names):
        total = float(sum(metrics[:, place].tolist()))
        reduced[name] = total / len(losses) if name.endswith(":mean") else total
    return Differentiated(float(sum(losses.tolist())), reduced, gradients)
