"""A mixture of experts in place of the feed-forward block, as in Qwen3-MoE (Yang et al. 2025).

Experts are split over ep. The rows of all devices of ep are gathered, every device runs its own experts
over them, and the sum of their outputs is scattered back. Each expert runs over all rows, with zeros where
it was not chosen: no token is ever dropped, and a token's output does not depend on the others' routing.

Dimension key as in qwen3.py; X expert, C choice, R row of any device of ep, G experts that run at once.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from spmd_tx.models.config import ModelConfig
from spmd_tx.models.forward_pass import Pass
from spmd_tx.models.layers import product, silu
from spmd_tx.models.lora import MLP, Lora
from spmd_tx.sharding.collectives import gather, sum_scatter, varying
from spmd_tx.sharding.mesh import EP

GROUP_ELEMENTS = 1 << 25  # at most, in one intermediate array of the experts that run at once

Kernels = dict[str, Array]  # gate [X, D, F], up [X, D, F], down [X, F, D]


def route(
    model: ModelConfig,
    router_DX: Float[Array, "D X"],
    h_BTD: Float[Array, "B T D"],
    replayed_BTC: Int[Array, "B T C"] | None,
) -> tuple[Int[Array, "B T C"], Float[Array, "B T X"]]:
    """Return the experts of each token, and every expert's weight for it: 0 where it was not chosen.

    Replayed choices are taken as given; -1 lets the router choose. The weights are always the router's own,
    so that its gradient stays the same.
    """
    logits_BTX = product("BTD,DX->BTX", h_BTD, router_DX)
    probability_BTX = jax.nn.softmax(logits_BTX, axis=-1)
    choices_BTC = lax.top_k(lax.stop_gradient(probability_BTX), model.experts_per_token)[1]
    if replayed_BTC is not None:
        replayed_BTC = replayed_BTC.astype(choices_BTC.dtype)
        choices_BTC = jnp.where(replayed_BTC >= 0, replayed_BTC, choices_BTC)
    numbers_X = jnp.arange(model.n_experts)[None, None, None]
    is_chosen_BTX = jnp.any(choices_BTC[..., None] == numbers_X, axis=-2)
    gates_BTX = jnp.where(is_chosen_BTX, probability_BTX, 0.0)
    if model.normalize_expert_weights:
        total_BT1 = jnp.sum(gates_BTX, axis=-1, keepdims=True)
        gates_BTX = gates_BTX / jnp.maximum(total_BT1, jnp.finfo(jnp.float32).tiny)
    return choices_BTC, gates_BTX.astype(h_BTD.dtype)


def gather_rows(x: Array) -> Array:
    """[B, ...] -> [R, ...]"""
    return gather(x, EP, 0)


def mixture(
    kernels: Kernels, lora: dict[str, Lora[Array]], h_BTD: Array, gates_BTX: Array, how: "Pass"
) -> Array:
    """Return the experts' weighted sum, to be summed over tp. The experts are split over ep."""
    h_RTD = gather_rows(h_BTD)
    gates_RTX = lax.all_to_all(gates_BTX, EP, split_axis=2, concat_axis=0, tiled=True)
    experts = (kernels, {name: lora[name] for name in MLP}, jnp.moveaxis(gates_RTX, 2, 0))
    local = gates_RTX.shape[2]
    size = _group_size(local, max(h_RTD.size, h_RTD.size // h_RTD.shape[2] * kernels["up"].shape[2]))
    groups = jax.tree.map(lambda x: x.reshape(local // size, size, *x.shape[1:]), experts)
    # Recomputed in the backward pass: the intermediates of all experts for all tokens would not fit.
    run = jax.checkpoint(partial(_group, how), prevent_cse=False)

    def add_group(sum_RTD: Array, group: tuple[Kernels, dict[str, Lora[Array]], Array]) -> tuple[Array, None]:
        return sum_RTD + run(h_RTD, group), None

    sum_RTD = lax.scan(add_group, varying(jnp.zeros_like(h_RTD)), groups)[0]
    return sum_scatter(sum_RTD, EP, 0)


def _group_size(experts: int, elements: int) -> int:
    """Return how many experts run at once, a divisor of their number."""
    size = max(1, min(experts, GROUP_ELEMENTS // elements))
    while experts % size:
        size -= 1
    return size


def _group(how: "Pass", h_RTD: Array, group: tuple[Kernels, dict[str, Lora[Array]], Array]) -> Array:
    """Return the sum of a few experts. It depends on shapes and each token's own numbers alone."""
    y_GRTD = jax.vmap(partial(_expert, how, h_RTD))(*group)
    return jnp.sum(y_GRTD, axis=0)


def _expert(how: "Pass", h_RTD: Array, w: Kernels, lora: dict[str, Lora[Array]], gate_RT: Array) -> Array:
    """Run one expert over all rows. Where it was not chosen its input is zero, and so is its output."""
    is_chosen_RT1 = (gate_RT != 0)[..., None]
    x_RTD = jnp.where(is_chosen_RT1, h_RTD, jnp.zeros((), h_RTD.dtype))
    width = w["up"].shape[1]
    gate_RTF = silu(how.linear(x_RTD, w["gate"], width) + how.expert_lora(x_RTD, lora["gate"]))
    up_RTF = how.linear(x_RTD, w["up"], width) + how.expert_lora(x_RTD, lora["up"])
    y_RTF = gate_RTF * up_RTF
    y_RTD = how.linear(y_RTF, w["down"], h_RTD.shape[2]) + how.expert_lora(y_RTF, lora["down"])
    return y_RTD * gate_RT[..., None]
