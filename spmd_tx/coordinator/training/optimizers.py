"""The optimizers that models can have: what requests say of each, and the command of a step. Pure.

All functions raise InvalidRequest for what a model cannot have or take.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from spmd_tx.coordinator.wire import unknown_fields
from spmd_tx.coordinator.wire.training import (
    AdamParams,
    DimuonParams,
    LoadWeightsRequest,
    OptimizerConfig,
    OptimStepRequest,
)
from spmd_tx.errors import InvalidRequest
from spmd_tx.protocol.commands import AdapterSpec, DimuonStep, OptimStep
from spmd_tx.protocol.optimizers import OptimizerName
from spmd_tx.protocol.programs import ProgramShape

HIGHEST = float(np.finfo(np.float32).max)
HIGHEST_BETA = float(np.nextafter(np.float32(1), np.float32(0)))  # what rounds to 1 divides by 0
LEAST = float(np.finfo(np.float32).tiny)  # what is smaller is 0 on devices


@dataclass(frozen=True)
class OptimizerStep:
    """Holds what a step of one model needs."""

    learning_rate: float
    command: Callable[[int], OptimStep | DimuonStep]  # of the slot
    program: ProgramShape


@dataclass(frozen=True)
class Optimizer:
    """Declares an optimizer."""

    config: OptimizerConfig  # as the SDK sends it
    step: Callable[[OptimStepRequest, AdapterSpec, bool], OptimizerStep]  # ``is_again``: without checks


def config_of(name: OptimizerName) -> OptimizerConfig:
    """Return an optimizer as the SDK knows it."""
    return OPTIMIZERS[name].config


def optimizer_of(config: OptimizerConfig | None, rank: int) -> OptimizerName:
    """Return the optimizer that a request asks for; AdamW without a wish. Rank 0: all weights."""
    if config is None:
        return "adamw"
    optimizer = OPTIMIZERS.get(config.type)
    if optimizer is None:
        known = " and ".join(map(repr, OPTIMIZERS))
        raise InvalidRequest(f"optimizer_config.type is {config.type!r}; this service has {known}")
    expected = optimizer.config.version
    if config.version is not None and config.version != expected:
        has = "has none, leave it out" if expected is None else f"has version {expected}"
        raise InvalidRequest(f"optimizer_config.version is {config.version}; {config.type} {has}")
    if config.type == "dimuon" and not rank:
        raise InvalidRequest(
            "optimizer_config.type is 'dimuon', which is for LoRA adapters; all weights take 'adamw'"
        )
    return "dimuon" if config.type == "dimuon" else "adamw"


def of_loaded(
    saved: AdapterSpec, request: LoadWeightsRequest, before: AdapterSpec | None = None
) -> AdapterSpec:
    """Return the adapter that a model has once it has loaded a checkpoint.

    ``before`` is what the model has; None: the request creates it. A model keeps its optimizer. A new one has
    that of the checkpoint with its state, or else the one that is asked for.
    """
    wish, with_state = request.optimizer_config, request.optimizer
    unasked = saved.optimizer if with_state else "adamw"
    own = unasked if wish is None else optimizer_of(wish, saved.rank)
    if before is not None:
        if wish is not None and own != before.optimizer:
            raise InvalidRequest(
                f"the model has {before.optimizer!r}, and keeps it; leave optimizer_config out"
            )
        own = before.optimizer
    if with_state and own != saved.optimizer:
        raise InvalidRequest(
            f"the checkpoint has the optimizer state of {saved.optimizer!r}, and the model's optimizer is "
            f"{own!r}; load the weights alone, or into a model with {saved.optimizer!r}"
        )
    return msgspec.structs.replace(saved, optimizer=own)


def step_of(request: OptimStepRequest, adapter: AdapterSpec, *, is_again: bool) -> OptimizerStep:
    """Return the step of a model's optimizer. What ran once runs again, whatever has been refused since."""
    return OPTIMIZERS[adapter.optimizer].step(request, adapter, is_again)


def _adamw(request: OptimStepRequest, _: AdapterSpec, is_again: bool) -> OptimizerStep:
    if request.optimizer_params is not None and not is_again:
        kind = request.optimizer_params.get("type")
        raise InvalidRequest(f"optimizer_params are of {kind!r}; this model has 'adamw', send adam_params")
    adam = request.adam_params or AdamParams()
    if not is_again:
        _check("adam_params", adam)
    values = msgspec.structs.asdict(adam)
    return OptimizerStep(
        adam.learning_rate, lambda slot: OptimStep(slot=slot, **values), ProgramShape(step="optim_step")
    )


def _dimuon(request: OptimStepRequest, adapter: AdapterSpec, is_again: bool) -> OptimizerStep:
    sent = request.optimizer_params
    if sent is None:
        what = "send" if request.adam_params is None else "adam_params are of 'adamw': send"
        raise InvalidRequest(f"this model has 'dimuon'; {what} optimizer_params of this type")
    if sent.get("type") != "dimuon":
        raise InvalidRequest(f"optimizer_params are of {sent.get('type')!r}, and this model has 'dimuon'")
    try:
        unknown_fields.check_json(sent, DimuonParams)
        params = msgspec.convert(sent, DimuonParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"optimizer_params of 'dimuon' cannot be read: {error}") from None
    if not is_again:
        _check("optimizer_params", params)
    values, rank = msgspec.structs.asdict(params), adapter.rank
    return OptimizerStep(
        params.learning_rate,
        lambda slot: DimuonStep(slot=slot, rank=rank, **values),
        ProgramShape(step="dimuon_step"),
    )


def _check(field: str, params: AdamParams | DimuonParams) -> None:
    """Raise InvalidRequest for a number out of its range."""
    for name in params.__struct_fields__:
        value = getattr(params, name)
        is_allowed, allowed = 0 <= value <= HIGHEST, "finite and at least 0, as a float32"
        if name in ("beta1", "beta2"):
            is_allowed, allowed = 0 <= value <= HIGHEST_BETA, "at least 0 and below 1, as a float32"
        elif name == "grad_clip_norm":
            if isinstance(params, DimuonParams) and -HIGHEST <= value < 0:
                continue  # clips nothing
            is_allowed &= not 0 < value < LEAST
            allowed += f": 0, which clips nothing, or at least {LEAST:g}"
        if not is_allowed:
            raise InvalidRequest(f"{field}.{name} is {value}; it must be {allowed}")


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(OptimizerConfig("adamw"), _adamw),
    "dimuon": Optimizer(OptimizerConfig("dimuon", version=1), _dimuon),
}
