"""Every reason to refuse a request, found before a worker hears of it. Pure; raises InvalidRequest."""

import hashlib
import math
from dataclasses import dataclass

import numpy as np

from spmd_tx.coordinator import prompt_wishes
from spmd_tx.coordinator.batching import LossSettings
from spmd_tx.coordinator.schemas import (
    AdamParams,
    LoraConfig,
    ModelInput,
    OptimizerConfig,
    OptimStepRequest,
    SampleRequest,
    SamplingParams,
)
from spmd_tx.coordinator.wire import Datum, ForwardBackwardRequest
from spmd_tx.errors import InvalidRequest
from spmd_tx.protocol import LOSS_NAMES, AdapterSpec


@dataclass(frozen=True)
class Limits:
    """What the served model and the server's options allow."""

    vocab_size: int
    max_context: int  # tokens
    max_rank: int


# The parameters of each loss, with their defaults.
LOSS_CONFIG: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
}

MAX_SAMPLES = 1024  # of one request

_SUPERVISED_INPUTS = ("target_tokens", "weights")
_REINFORCED_INPUTS = ("target_tokens", "logprobs", "advantages")
_IGNORED_INPUTS = {"mask", "provenance"}  # left over in the datums of many training scripts


def check_forward_backward(request: ForwardBackwardRequest, limits: Limits) -> LossSettings:
    """Accept the request's loss and every datum of it, or say which one cannot be used and why."""
    loss = _loss_settings(request.loss_fn, request.loss_config)
    if not request.data:
        raise InvalidRequest("the request holds no datums; send at least one")
    supervised = request.loss_fn == "cross_entropy"
    needed = _SUPERVISED_INPUTS if supervised else _REINFORCED_INPUTS
    ignored = _IGNORED_INPUTS if supervised else _IGNORED_INPUTS | {"weights"}
    for index, datum in enumerate(request.data):
        problem = datum.problem or _structure_problem(datum, request.loss_fn, needed, ignored, limits)
        if problem:
            raise InvalidRequest(f"datum {index}: {problem}")
    _check_values(request.data, supervised, limits)
    return loss


def check_adam(request: OptimStepRequest) -> AdamParams:
    """The step's hyper-parameters, each in its range."""
    if request.optimizer_params is not None:
        kind = request.optimizer_params.get("type")
        raise InvalidRequest(
            f"optimizer_params asks for {kind!r}; this service has AdamW only, send adam_params"
        )
    adam = request.adam_params or AdamParams()
    for name in adam.__struct_fields__:
        value = getattr(adam, name)
        is_beta = name in ("beta1", "beta2")
        if not math.isfinite(value) or value < 0 or (is_beta and value >= 1):
            allowed = "at least 0 and below 1" if is_beta else "finite and at least 0"
            raise InvalidRequest(f"adam_params.{name} is {value}; it must be {allowed}")
    return adam


def check_lora(config: LoraConfig | None, optimizer: OptimizerConfig | None, limits: Limits) -> AdapterSpec:
    """The adapter that create_model asks for."""
    if config is None:
        raise InvalidRequest("lora_config is missing; this service trains LoRA adapters, so send a rank")
    if not 1 <= config.rank <= limits.max_rank:
        raise InvalidRequest(
            f"lora_config.rank is {config.rank}; it must be between 1 and {limits.max_rank} "
            "(the operator raises the limit with --max-lora-rank)"
        )
    if not (config.train_attn or config.train_mlp or config.train_unembed):
        raise InvalidRequest("lora_config trains nothing; set train_attn, train_mlp or train_unembed")
    check_optimizer(optimizer)
    return AdapterSpec(
        rank=config.rank,
        train_attn=config.train_attn,
        train_mlp=config.train_mlp,
        train_unembed=config.train_unembed,
    )


def check_optimizer(optimizer: OptimizerConfig | None) -> None:
    if optimizer is not None and optimizer.type != "adamw":
        raise InvalidRequest(f"optimizer_config.type is {optimizer.type!r}; this service has 'adamw' only")


def adapter_seed(config: LoraConfig, model_id: str) -> int:
    """The seed as a worker takes it; without one, each model gets its own."""
    if config.seed is not None:
        return config.seed & (2**63 - 1)
    return int.from_bytes(hashlib.blake2b(model_id.encode(), digest_size=8).digest()) >> 1


def check_sample(request: SampleRequest, limits: Limits) -> None:
    """Accept a sample's prompt, counts and parameters, or say what has to change."""
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise InvalidRequest(f"num_samples is {request.num_samples}; it must be between 1 and {MAX_SAMPLES}")
    prompt_length = _check_prompt(request.prompt, limits)
    _check_sampling_params(request.sampling_params, limits)
    _check_length(prompt_length, request.sampling_params.max_tokens, limits)
    each = request.sampling_params.max_tokens or limits.max_context - prompt_length
    prompt_wishes.check(request, prompt_length, each * request.num_samples, limits.vocab_size)


def _check_prompt(prompt: ModelInput, limits: Limits) -> int:
    length = 0
    for chunk in prompt.chunks:
        if chunk.tokens is None:
            raise InvalidRequest(
                f"the prompt holds a chunk of kind {chunk.kind!r}; this model takes text, "
                "so send encoded_text chunks only"
            )
        if chunk.tokens and not 0 <= min(chunk.tokens) <= max(chunk.tokens) < limits.vocab_size:
            wrong = next(token for token in chunk.tokens if not 0 <= token < limits.vocab_size)
            raise InvalidRequest(f"the prompt has the token id {wrong}; {_vocabulary(limits)}")
        length += len(chunk.tokens)
    if not length:
        raise InvalidRequest("the prompt is empty; send at least one token")
    return length


def _check_sampling_params(params: SamplingParams, limits: Limits) -> None:
    refusals = {
        "temperature": (0 <= params.temperature < math.inf, "a finite number, at least 0 (0 is greedy)"),
        "top_p": (0 < params.top_p <= 1, "above 0 and at most 1 (1 is off)"),
        "top_k": (params.top_k == -1 or params.top_k >= 1, "at least 1, or -1 (off)"),
        "max_tokens": (params.max_tokens is None or params.max_tokens >= 1, "at least 1, or left out"),
        "seed": (params.seed is None or -(2**63) <= params.seed < 2**64, "a 64-bit integer"),
    }
    for name, (is_allowed, allowed) in refusals.items():
        if not is_allowed:
            raise InvalidRequest(f"sampling_params.{name} is {getattr(params, name)}; it must be {allowed}")
    _check_stop(params.stop, limits)


def _check_stop(stop: str | list[str | int] | None, limits: Limits) -> None:
    stops = stop if isinstance(stop, list) else [] if stop is None else [stop]
    if len({type(item) for item in stops}) > 1:
        raise InvalidRequest("sampling_params.stop mixes strings and token ids; send one kind")
    for item in stops:
        if item == "":
            raise InvalidRequest(
                "sampling_params.stop has an empty string, which would stop everything; leave it out, "
                "or send [] to switch all stops off"
            )
        if isinstance(item, int) and not 0 <= item < limits.vocab_size:
            raise InvalidRequest(f"sampling_params.stop has the token id {item}; {_vocabulary(limits)}")


def _check_length(prompt_length: int, max_tokens: int | None, limits: Limits) -> None:
    room = limits.max_context - prompt_length
    if room < 1:
        raise InvalidRequest(
            f"the prompt is too long: it has {prompt_length} tokens and the context holds "
            f"{limits.max_context}, one of them to be drawn; shorten it to {limits.max_context - 1} or less"
        )
    if max_tokens is not None and max_tokens > room:
        raise InvalidRequest(
            f"the prompt is too long for max_tokens {max_tokens}: it has {prompt_length} tokens and the "
            f"context holds {limits.max_context}; send max_tokens {room} or less, or a shorter prompt"
        )


def _vocabulary(limits: Limits) -> str:
    return f"ids of this model are 0 to {limits.vocab_size - 1}"


def _loss_settings(name: str, config: dict[str, float | str]) -> LossSettings:
    if name not in LOSS_NAMES:
        raise InvalidRequest(f"loss_fn is {name!r}; this service has {', '.join(LOSS_NAMES)}")
    values = dict(LOSS_CONFIG[name])
    for key, value in config.items():
        if key not in values:
            known = ", ".join(values) or "none"
            raise InvalidRequest(f"loss_fn_config has the key {key!r}; those of {name} are: {known}")
        if isinstance(value, str) or not math.isfinite(value) or value < 0:
            raise InvalidRequest(f"loss_fn_config.{key} is {value!r}; it must be a finite number, at least 0")
        values[key] = value
    low, high = values.get("clip_low_threshold", 0.0), values.get("clip_high_threshold", 0.0)
    if low > high:
        raise InvalidRequest(
            f"loss_fn_config has clip_low_threshold {low} above clip_high_threshold {high}; "
            "both are bounds of the probability ratio, low first"
        )
    return LossSettings(LOSS_NAMES.index(name), low, high, values.get("beta", 0.0))


def _structure_problem(
    datum: Datum, loss_fn: str, needed: tuple[str, ...], ignored: set[str], limits: Limits
) -> str | None:
    """What is wrong with a datum before its numbers are looked at."""
    length, inputs = len(datum.tokens), datum.loss_inputs
    if not length:
        return "model_input is empty; it needs at least one token"
    if length > limits.max_context:
        return (
            f"model_input has {length} tokens and the context holds {limits.max_context}; "
            "shorten it, or the operator raises --max-context-length"
        )
    for key in inputs:
        if key not in needed and key not in ignored:
            return f"loss_fn_inputs has the key {key!r}; {loss_fn} takes {', '.join(needed)}"
    for key in needed:
        values = inputs.get(key)
        if values is None:
            return f"loss_fn_inputs lacks {key}; {loss_fn} takes {', '.join(needed)}"
        if values.shape != (length,):  # the common case is decided by one comparison
            problem = _shape_problem(key, values, length)
            if problem:
                return problem
    if inputs["target_tokens"].dtype.kind != "i":
        return f"target_tokens has dtype {inputs['target_tokens'].dtype}; token ids are integers, send int64"
    return None


def _shape_problem(key: str, values: np.ndarray, length: int) -> str | None:
    if values.ndim == 2 and values.shape[1] > 1:
        return (
            f"{key} has the shape {list(values.shape)}; this service takes one target per position, "
            f"so send [{length}] or [{length}, 1]"
        )
    if values.shape == (length, 1):
        return None
    return (
        f"{key} has the shape {list(values.shape)} and model_input has {length} tokens; "
        "there must be one value per token (target_tokens[i] is what follows token i)"
    )


def _check_values(datums: list[Datum], supervised: bool, limits: Limits) -> None:
    """Look at the numbers of all datums at once; a datum is searched only when one is wrong."""
    vocabulary = limits.vocab_size
    tokens = np.concatenate([datum.tokens for datum in datums])
    targets = _all(datums, "target_tokens")
    remedy = _vocabulary(limits)
    _refuse(datums, "model_input", tokens, (tokens < 0) | (tokens >= vocabulary), remedy)
    _refuse(datums, "target_tokens", targets, (targets < 0) | (targets >= vocabulary), remedy)
    if supervised:
        weights = _all(datums, "weights")
        _refuse(datums, "weights", weights, ~np.isfinite(weights), "it must be a finite float32")
        return
    advantages, logprobs = _all(datums, "advantages"), _all(datums, "logprobs")
    _refuse(datums, "advantages", advantages, ~np.isfinite(advantages), "it must be a finite float32")
    wrong = ~np.isfinite(logprobs) & (advantages != 0)
    _refuse(datums, "logprobs", logprobs, wrong, "it must be finite wherever the advantage is not 0")


def _refuse(datums: list[Datum], key: str, values: np.ndarray, wrong: np.ndarray, remedy: str) -> None:
    if not wrong.any():
        return
    place = int(wrong.argmax())
    ends = np.cumsum([len(datum.tokens) for datum in datums])
    index = int(np.searchsorted(ends, place, side="right"))
    position = place - int(ends[index]) + len(datums[index].tokens)
    raise InvalidRequest(f"datum {index}: {key} has {values[place]} at position {position}; {remedy}")


def _all(datums: list[Datum], key: str) -> np.ndarray:
    return np.concatenate([datum.loss_inputs[key].ravel() for datum in datums])
