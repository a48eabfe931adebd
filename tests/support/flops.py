"""What XLA counts of the steps of training. Arrays are only declared, so that models may have real sizes."""

from typing import Any

import jax
import jax.numpy as jnp

from spmd_tx.hlo.cost import cost_of
from spmd_tx.models.base_weights import weights
from spmd_tx.models.declared.model import Model
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.sharding.weight import abstract
from spmd_tx.worker.steps.losses import TokenLossInputs
from spmd_tx.worker.steps.train import Rows, make_forward, make_forward_backward
from spmd_tx.worker.steps.train_state import train_weights


def flops(model: Model, rows: tuple[int, int], tp: int = 1, level: str | None = None) -> float:
    """FLOPs on one device of a forward pass over rows (how many, tokens of each), or with a backward pass.

    An adapter of rank 1 takes part.
    """
    mesh = make_mesh(1, 1, tp)
    base, state = weights(model, mesh, jnp.bfloat16), train_weights(model, mesh, 1, 1)
    arrays, trained = abstract(mesh, base), abstract(mesh, state)
    if level is None:
        step: Any = make_forward(model, mesh, base, state)
        given = arrays, trained.w, trained.scale
    else:
        step = make_forward_backward(model, mesh, base, state, level)
        given = arrays, trained.w, trained.grad_sum, trained.scale
    return cost_of(step.lower(*given, *batch(*rows)).compile().as_text()).flops


def batch(count: int, length: int) -> tuple[Rows, TokenLossInputs]:
    integers, floats = (jax.ShapeDtypeStruct((count, length), dtype) for dtype in (jnp.int32, jnp.float32))
    kinds, of_row = (jax.ShapeDtypeStruct((count, 1), dtype) for dtype in (jnp.int32, jnp.float32))
    names = ("weights", "advantages", "sampling_logprobs", "clip_low", "clip_high")
    loss = TokenLossInputs(kinds=kinds, beta=of_row, kl_coeff=of_row, **dict.fromkeys(names, floats))
    slots = jax.ShapeDtypeStruct((count,), jnp.int32)
    return Rows(tokens=integers, targets=integers, segments=integers, positions=integers, slots=slots), loss
