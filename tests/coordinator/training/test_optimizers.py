"""Which optimizer a model has, which steps it takes, and what it becomes when it loads a checkpoint."""

import re
from typing import Any

import msgspec
import pytest

from spmd_tx.coordinator.training.optimizers import of_loaded, optimizer_of, step_of
from spmd_tx.coordinator.wire.training import (
    AdamParams,
    LoadWeightsRequest,
    OptimizerConfig,
    OptimStepRequest,
)
from spmd_tx.errors import InvalidRequest
from spmd_tx.protocol.commands import AdapterSpec, DimuonStep, OptimStep

ADAPTER, DIMUON = AdapterSpec(rank=2), AdapterSpec(rank=2, optimizer="dimuon")


def test_adam_parameters_default_to_those_of_the_sdk():
    command = step_of(OptimStepRequest("m", 1), ADAPTER, is_again=False).command(0)
    assert command == OptimStep(slot=0, **msgspec.structs.asdict(AdamParams()))


@pytest.mark.parametrize(
    "params, message",
    [
        ({"learning_rate": -1e-4}, "adam_params.learning_rate is -0.0001; it must be finite and at least 0"),
        (
            {"learning_rate": 1e39},
            "adam_params.learning_rate is 1e+39; it must be finite and at least 0, as a",
        ),
        ({"beta1": 1 - 1e-11}, "adam_params.beta1 is 0.99999999999; it must be at least 0 and below 1, as a"),
        ({"beta2": 1 - 2**-26}, "it must be at least 0 and below 1, as a float32"),
        ({"eps": 1e39}, "adam_params.eps is 1e+39"),
        ({"weight_decay": 1e300}, "adam_params.weight_decay is 1e+300"),
        ({"grad_clip_norm": 1e-46}, "adam_params.grad_clip_norm is 1e-46; it must be"),
        ({"grad_clip_norm": 1e-39}, "0, which clips nothing, or at least 1.17549e-38"),
        ({"learning_rate": float("nan")}, "adam_params.learning_rate is nan"),
        ({"beta1": 1.0}, "adam_params.beta1 is 1.0; it must be at least 0 and below 1"),
        ({"beta2": -0.1}, "adam_params.beta2 is -0.1"),
        ({"eps": float("inf")}, "adam_params.eps is inf"),
        ({"weight_decay": -1.0}, "adam_params.weight_decay is -1.0"),
        ({"grad_clip_norm": -1.0}, "adam_params.grad_clip_norm is -1.0"),
    ],
)
def test_an_adam_parameter_out_of_range_is_refused(params, message):
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        step_of(OptimStepRequest("m", 1, adam_params=AdamParams(**params)), ADAPTER, is_again=False)


def test_adam_parameters_may_be_at_the_edges_of_float32():
    params = AdamParams(learning_rate=3e38, beta1=1 - 2**-24, beta2=0.0, eps=1e-300, grad_clip_norm=1.2e-38)
    step = step_of(OptimStepRequest("m", 1, adam_params=params), ADAPTER, is_again=False)
    assert step.command(3) == OptimStep(slot=3, **msgspec.structs.asdict(params))


def dimuon(**params: Any) -> OptimStepRequest:
    return OptimStepRequest("m", 1, optimizer_params={"type": "dimuon", **params})


def test_a_step_of_dimuon_knows_the_rank():
    command = step_of(dimuon(learning_rate=0.1, grad_clip_norm=-1.0), DIMUON, is_again=False).command(3)
    assert command == DimuonStep(slot=3, rank=2, learning_rate=0.1, beta1=0.9, grad_clip_norm=-1.0)


@pytest.mark.parametrize(
    "adapter, request_, message",
    [
        (ADAPTER, dimuon(learning_rate=1e-3), "of 'dimuon'; this model has 'adamw', send"),
        (
            DIMUON,
            OptimStepRequest("m", 1, adam_params=AdamParams()),
            "has 'dimuon'; adam_params are of 'adamw'",
        ),
        (DIMUON, OptimStepRequest("m", 1), "has 'dimuon'; send optimizer_params of this type"),
        (DIMUON, OptimStepRequest("m", 1, optimizer_params={"type": "lion"}), "are of 'lion'"),
        (DIMUON, dimuon(), "missing required field `learning_rate`"),
        (DIMUON, dimuon(learning_rate=-1.0), "optimizer_params.learning_rate is -1.0"),
        (DIMUON, dimuon(learning_rate=1.0, beta1=1.0), "optimizer_params.beta1 is 1.0"),
        (DIMUON, dimuon(learning_rate=1.0, grad_clip_norm=float("nan")), "grad_clip_norm is nan"),
        (DIMUON, dimuon(learning_rate=1.0, beta2=0.9), "beta2 is not known"),
    ],
)
def test_a_step_that_the_optimizer_does_not_take_is_refused(adapter, request_, message):
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        step_of(request_, adapter, is_again=False)


def test_an_optimizer_that_a_model_cannot_have_is_refused_by_name():
    with pytest.raises(InvalidRequest, match="'lion'; this service has 'adamw' and 'dimuon'"):
        optimizer_of(OptimizerConfig("lion"), rank=1)
    with pytest.raises(InvalidRequest, match="version is 1; adamw has none"):
        optimizer_of(OptimizerConfig("adamw", version=1), rank=1)
    with pytest.raises(InvalidRequest, match="'dimuon', which is for LoRA adapters"):
        optimizer_of(OptimizerConfig("dimuon", version=1), rank=0)


def load(*, optimizer: bool, wish: str | None = None) -> LoadWeightsRequest:
    config = None if wish is None else OptimizerConfig(wish)
    return LoadWeightsRequest("p", optimizer, optimizer_config=config)


def test_a_new_model_has_the_optimizer_of_its_state_or_the_one_asked_for():
    assert of_loaded(DIMUON, load(optimizer=True)) == DIMUON
    assert of_loaded(DIMUON, load(optimizer=False)) == ADAPTER
    assert of_loaded(ADAPTER, load(optimizer=False, wish="dimuon")) == DIMUON
    with pytest.raises(InvalidRequest, match="state of 'dimuon', and the model's optimizer is 'adamw'"):
        of_loaded(DIMUON, load(optimizer=True, wish="adamw"))


def test_a_model_keeps_its_optimizer_when_it_loads():
    assert of_loaded(ADAPTER, load(optimizer=False), before=DIMUON) == DIMUON
    assert of_loaded(DIMUON, load(optimizer=True), before=DIMUON) == DIMUON
    with pytest.raises(InvalidRequest, match="state of 'adamw', and the model's optimizer is 'dimuon'"):
        of_loaded(ADAPTER, load(optimizer=True), before=DIMUON)
    with pytest.raises(InvalidRequest, match="has 'dimuon', and keeps it"):
        of_loaded(ADAPTER, load(optimizer=False, wish="adamw"), before=DIMUON)
