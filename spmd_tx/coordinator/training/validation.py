"""Validates training requests before they reach a worker. Pure; raises InvalidRequest."""

import hashlib
from dataclasses import replace

import numpy as np

from spmd_tx.coordinator.training.losses import CLIPS, LOSSES, LossEntry, LossSettings, loss_settings
from spmd_tx.coordinator.training.optimizers import optimizer_of
from spmd_tx.coordinator.wire.limits import WHO_SEES, Limits, vocabulary
from spmd_tx.coordinator.wire.training import LoraConfig, OptimizerConfig
from spmd_tx.coordinator.wire.training_protobuf import Datum, ForwardBackwardRequest
from spmd_tx.errors import InvalidRequest
from spmd_tx.protocol.commands import MAX_TARGETS, AdapterSpec

# What says how much a target counts
COUNTED = frozenset({"weights", "advantages", "sequence_ratio_mask"})


def check_lora(config: LoraConfig | None, optimizer: OptimizerConfig | None, limits: Limits) -> AdapterSpec:
    """Return the adapter that create_model asks for; rank 0 stands for all weights."""
    if not limits.max_rank:
        config = config or LoraConfig(rank=0)
        if config.rank != 0:
            raise InvalidRequest(
                f"lora_config.rank is {config.rank}; this server trains all weights (--full-parameters), so "
                "send rank 0, or use a server that trains adapters"
            )
    elif config is None:
        raise InvalidRequest("lora_config is missing; this service trains LoRA adapters, so send a rank")
    elif config.rank == 0:
        raise InvalidRequest(
            "lora_config.rank is 0, which asks to train the base model itself; this service trains LoRA "
            f"adapters, so send a rank between 1 and {limits.max_rank} (the operator serves training of all "
            "weights with --full-parameters)"
        )
    elif not 1 <= config.rank <= limits.max_rank:
        raise InvalidRequest(
            f"lora_config.rank is {config.rank}; it must be between 1 and {limits.max_rank} "
            "(the operator raises the limit with --max-lora-rank)"
        )
    if not (config.train_attn or config.train_mlp or config.train_unembed):
        raise InvalidRequest("lora_config trains nothing; set train_attn, train_mlp or train_unembed")
    return AdapterSpec(
        rank=config.rank,
        train_attn=config.train_attn,
        train_mlp=config.train_mlp,
        train_unembed=config.train_unembed,
        optimizer=optimizer_of(optimizer, config.rank),
    )


def adapter_seed(config: LoraConfig | None, model_id: str) -> int:
    """Return the seed for a worker; without one in the request it is derived from the model's id."""
    if config is not None and config.seed is not None:
        return config.seed & (2**63 - 1)
    return int.from_bytes(hashlib.blake2b(model_id.encode(), digest_size=8).digest()) >> 1


def with_ones(request: ForwardBackwardRequest) -> ForwardBackwardRequest:
    """Give each datum the inputs that are 1 where it has none, as the weights of cross_entropy.

    Where a position has several targets they stay missing: tensors that were sent sparse also hold cells that
    are no targets.
    """
    entry = LOSSES.get(request.loss_fn)
    if entry is None or not entry.else_ones:
        return request
    return replace(request, data=[_with_ones(datum, entry) for datum in request.data])


def _with_ones(datum: Datum, entry: LossEntry) -> Datum:
    targets, length = datum.loss_inputs.get("target_tokens"), len(datum.tokens)
    if targets is None or targets.shape not in ((length,), (length, 1)):
        return datum
    ones = {key: np.ones(targets.shape, np.float32) for key in entry.else_ones}
    return replace(datum, loss_inputs=ones | datum.loss_inputs)


def without_image_targets(request: ForwardBackwardRequest) -> ForwardBackwardRequest:
    """Let targets that are tokens of images count nothing, whatever weight or advantage was sent for them."""
    if not any(datum.images for datum in request.data):
        return request
    return replace(request, data=[_without_image_targets(datum) for datum in request.data])


def _without_image_targets(datum: Datum) -> Datum:
    counted = {key: values.copy() for key, values in datum.loss_inputs.items() if key in COUNTED}
    for image in datum.images:
        for values in counted.values():
            values[max(0, image.first - 1) : image.end - 1] = 0  # a target is the token behind its place
    return replace(datum, loss_inputs=datum.loss_inputs | counted)


def check_forward_backward(request: ForwardBackwardRequest, limits: Limits) -> LossSettings:
    """Return the request's loss if all datums can be used. Raises InvalidRequest, which names the datum."""
    loss = loss_settings(request.loss_fn, request.loss_config)
    entry = LOSSES[loss.name]
    if not request.data:
        raise InvalidRequest("the request holds no datums; send at least one")
    for index, datum in enumerate(request.data):
        problem = datum.problem or _structure_problem(datum, loss.name, entry, limits)
        if problem:
            raise InvalidRequest(f"datum {index}: {problem}")
    _check_tokens(request.data, limits)
    if loss.name == "cross_entropy":
        weights = joined(request.data, "weights")
        _refuse(request.data, "weights", weights, ~np.isfinite(weights), "it must be a finite float32")
    else:
        _check_reinforced(request.data, entry)
        _check_clips(request.data, loss)
    return loss


def _structure_problem(datum: Datum, loss_fn: str, entry: LossEntry, limits: Limits) -> str | None:
    """Say what is wrong with a datum's keys, shapes and types; None: nothing."""
    length, inputs = len(datum.tokens), datum.loss_inputs
    if not length:
        return "model_input is empty; it needs at least one token"
    if datum.images and limits.images is None:
        return (
            f"its model_input holds an image, and this model takes text alone; leave the image out {WHO_SEES}"
        )
    if length > limits.max_context:
        return (
            f"model_input has {length} tokens and the context holds {limits.max_context}; "
            "shorten it, or the operator raises --max-context-length"
        )
    per_token = (*entry.needed, *entry.else_ones)
    for key in inputs:
        if key not in per_token and key not in entry.optional and key not in entry.ignored:
            return f"loss_fn_inputs has the key {key!r}; {loss_fn} takes {entry.inputs}"
    for key in per_token:
        values = inputs.get(key)
        if values is None:
            if key in entry.needed:
                return f"loss_fn_inputs lacks {key}; {loss_fn} takes {entry.inputs}"
            return f"loss_fn_inputs lacks {key}; only a datum with one target per position may leave it out"
        if values.shape != (length,):  # the common case is decided by one comparison
            problem = _shape_problem(key, values, length, loss_fn)
            if problem:
                return problem
    if inputs["target_tokens"].dtype.kind != "i":
        return f"target_tokens has dtype {inputs['target_tokens'].dtype}; token IDs are integers, send int64"
    if "weights" in entry.else_ones and inputs["weights"].size != inputs["target_tokens"].size:
        return (
            f"target_tokens has the shape {list(inputs['target_tokens'].shape)} and weights has "
            f"{list(inputs['weights'].shape)}; every target has its own weight, so send both in one shape"
        )
    return _optional_problem(datum, entry)


def _shape_problem(key: str, values: np.ndarray, length: int, loss_fn: str) -> str | None:
    shape = list(values.shape)
    if values.ndim == 2 and shape[0] == length and shape[1] > 0:
        if shape[1] == 1 or (loss_fn == "cross_entropy" and shape[1] <= MAX_TARGETS):
            return None
        if loss_fn == "cross_entropy":
            return (
                f"{key} has the shape {shape}; a position has at most {MAX_TARGETS} targets, so keep those "
                "with the largest weights"
            )
        return (
            f"{key} has the shape {shape}; {loss_fn} takes one target per position, so send [{length}] "
            "(several are for cross_entropy)"
        )
    return (
        f"{key} has the shape {shape} and model_input has {length} tokens; "
        "there must be one value per token (target_tokens[i] is what follows token i)"
    )


def _optional_problem(datum: Datum, entry: LossEntry) -> str | None:
    length = len(datum.tokens)
    for key in entry.optional:
        values = datum.loss_inputs.get(key)
        if values is not None and values.size != 1 and values.shape not in ((length,), (length, 1)):
            return (
                f"{key} has the shape {list(values.shape)} and model_input has {length} tokens; send one "
                "value for the datum, or one per token"
            )
    return None


def _check_tokens(datums: list[Datum], limits: Limits) -> None:
    """Check the token IDs of all datums at once; the datum is searched only when one is wrong."""
    tokens = np.concatenate([datum.tokens for datum in datums])
    targets = joined(datums, "target_tokens")
    remedy, size = vocabulary(limits), limits.vocab_size
    ends = np.cumsum([len(datum.tokens) for datum in datums])
    _refuse_at(ends, datums, "model_input", tokens, (tokens < 0) | (tokens >= size), remedy)
    _refuse(datums, "target_tokens", targets, (targets < 0) | (targets >= size), remedy)


def _check_reinforced(datums: list[Datum], entry: LossEntry) -> None:
    advantages = joined(datums, "advantages")
    _refuse(datums, "advantages", advantages, ~np.isfinite(advantages), "it must be a finite float32")
    counts, condition = advantages != 0, "wherever the advantage is not 0"
    if "sequence_ratio_mask" in entry.needed:
        mask = joined(datums, "sequence_ratio_mask")
        _refuse(datums, "sequence_ratio_mask", mask, ~np.isfinite(mask), "send 1 or 0")
        counts, condition = counts | (mask != 0), f"{condition}, or sequence_ratio_mask is not"
    if "logprobs" in entry.needed:
        logprobs = joined(datums, "logprobs")
        wrong = ~np.isfinite(logprobs) & counts
        _refuse(datums, "logprobs", logprobs, wrong, f"it must be finite {condition}")


def _check_clips(datums: list[Datum], loss: LossSettings) -> None:
    for index, datum in enumerate(datums):
        given = [key for key in CLIPS if key in datum.loss_inputs]
        for key in given:
            values = datum.loss_inputs[key].ravel()
            wrong = ~np.isfinite(values) | (values < 0)
            if wrong.any():
                raise InvalidRequest(
                    f"datum {index}: {key} has {values[wrong.argmax()]} at position {wrong.argmax()}; "
                    "it must be finite and at least 0"
                )
        if given:
            low, high = clips_of(datum, loss)
            wrong = low > high
            if wrong.any():
                place = int(wrong.argmax())
                raise InvalidRequest(
                    f"datum {index}: clip_low_threshold {low[place]:g} is above clip_high_threshold "
                    f"{high[place]:g} at position {place}; both are bounds of the probability ratio"
                )


def clips_of(datum: Datum, loss: LossSettings) -> tuple[np.ndarray, np.ndarray]:
    """Return the thresholds of each token, float32 [N]: the datum's own, else the request's."""

    def one(key: str, default: float) -> np.ndarray:
        values = datum.loss_inputs.get(key, np.float32(default))
        return np.broadcast_to(values.ravel().astype(np.float32), len(datum.tokens))

    low, high = CLIPS
    return one(low, loss.clip_low), one(high, loss.clip_high)


def _refuse(datums: list[Datum], key: str, values: np.ndarray, wrong: np.ndarray, remedy: str) -> None:
    if wrong.any():
        ends = np.cumsum([datum.loss_inputs[key].size for datum in datums])
        _refuse_at(ends, datums, key, values, wrong, remedy)


def _refuse_at(
    ends: np.ndarray, datums: list[Datum], key: str, values: np.ndarray, wrong: np.ndarray, remedy: str
) -> None:
    """``ends`` are where the datums' values end in ``values``."""
    if not wrong.any():
        return
    place = int(wrong.argmax())
    index = int(np.searchsorted(ends, place, side="right"))
    within = place - int(ends[index - 1] if index else 0)
    size = int(ends[index]) - int(ends[index - 1] if index else 0)
    position, target = divmod(within, max(1, size // len(datums[index].tokens)))
    which = f", target {target}" if size > len(datums[index].tokens) else ""
    raise InvalidRequest(f"datum {index}: {key} has {values[place]} at position {position}{which}; {remedy}")


def joined(datums: list[Datum], key: str) -> np.ndarray:
    """Return the values of all datums, end to end."""
    return np.concatenate([datum.loss_inputs[key].ravel() for datum in datums])
