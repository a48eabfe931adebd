"""A mixture of experts in place of the feed-forward block, as in Qwen3-MoE (Yang et al. 2025).

Experts are split over ep. The rows of all devices of ep are gathered, every device runs its own experts
over them, and the sum of their outputs is scattered back. An expert runs over the tokens that chose it
(experts/grouped.py); small experts run over all rows, with zeros where they were not chosen. No token is ever
dropped, and a token's output does not depend on the others' routing.

Dimension key as in backbone.py; X expert, C choice, R row of any device of ep, G experts that run at once.
"""

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from spmd_tx.models.activations import gated
from spmd_tx.models.adapters.lora import Lora
from spmd_tx.models.adapters.row_lora import whole
from spmd_tx.models.checkpoint.packed import Matrix, Packed, decoded
from spmd_tx.models.declared.model import Model
from spmd_tx.models.experts import slot_product
from spmd_tx.models.experts.factors import (
    Factors,
    expert_factors,
    is_shared,
    model_width,
    output_width,
    shared_factors,
    split_input,
)
from spmd_tx.models.experts.grouped import Grouping, Matrices, run_experts
from spmd_tx.models.experts.layout import Choices, layout
from spmd_tx.models.experts.product import READS_PACKED
from spmd_tx.models.forward_pass import Pass
from spmd_tx.sharding.collectives import gather, sum_scatter, varying
from spmd_tx.sharding.mesh import EP, TP

GROUP_ELEMENTS = 1 << 25  # at most, in one intermediate array of the experts that run at once
LEAST_GROUPED = 1 << 18  # numbers in one matrix of all experts; less is faster without grouping
LANES = 128  # rows of another width are turned around by TPUs' XLA, so that it copies them again and again
FEW_ROWS = 32  # of a decode: CPUs then read every expert's matrices faster than they find the chosen ones


def gather_rows(x: Array) -> Array:
    """[B, ...] -> [R, ...]"""
    return gather(x, EP, 0)


def reads_stack(up_LXDF: Matrix, d_model: int, experts: int, how: "Pass") -> bool:
    """Say whether the experts' kernels take matrices from the stack of layers, without copying them."""
    if isinstance(up_LXDF, Packed) and how.kernels.products not in READS_PACKED:
        return False
    depth, width = up_LXDF.shape[-2:]
    is_small = experts * d_model * width * lax.axis_size(TP) < LEAST_GROUPED
    return how.kernels.products != "reference" and depth == d_model and not is_small


def mixture(
    matrices: Matrices,
    lora: dict[str, Lora[Array]],
    h_BTD: Array,
    routed: tuple[Int[Array, "B T C"], Float[Array, "B T X"]],
    how: "Pass",
    layer: Int[Array, ""] | None = None,
    activation: str = "silu",
) -> Array:
    """Return the experts' weighted sum, to be summed over tp. The experts are split over ep.

    ``routed`` is what ``routing.route`` returned; the activation is one of activations.ACTIVATIONS. With
    ``layer`` the matrices are those of all layers that are stacked, for which ``reads_stack`` must hold; it
    is the number of this one among them.
    """
    run = partial(_run, activation, matrices)
    if not is_shared(lora):
        return sum_scatter(run(lora, h_BTD, routed, how, layer), EP, 0)
    # What all experts share is computed once: their inputs are wider by x Aᵀ, and so are their outputs.
    halves, own = how.expert_lora.halves, expert_factors(lora)
    outer = {name: whole(factors) for name, factors in shared_factors(lora).items()}
    low_BTQ = [halves.low(h_BTD, outer[name].a) for name in ("gate", "up")]
    wide_BTI = jnp.concatenate([h_BTD, *low_BTQ], axis=2)
    y_BTO = sum_scatter(run(own, wide_BTI, routed, how, layer), EP, 0)
    width = h_BTD.shape[2]
    low_BTQ = y_BTO[:, :, width : width + outer["down"].b.shape[-2]]
    low_BTQ = checkpoint_name(low_BTQ, "expert_low_rank")
    return y_BTO[:, :, :width] + halves.high(low_BTQ, outer["down"].b)


def _run(
    activation: str,
    matrices: Matrices,
    lora: Factors,
    h_BTI: Array,
    routed: tuple[Int[Array, "B T C"], Float[Array, "B T X"]],
    how: "Pass",
    layer: Int[Array, ""] | None,
) -> Array:
    """Return the sum [R, T, O] of this device's experts for the rows of all devices of ep."""
    (depth, width), experts, d_model = matrices["up"].shape[-2:], routed[1].shape[2], model_width(lora, h_BTI)
    is_split = depth != d_model
    is_small = experts * d_model * width * lax.axis_size(TP) < LEAST_GROUPED
    if how.kernels.platform == "cpu" and h_BTI.shape[1] == 1:
        is_small |= h_BTI.shape[0] * lax.axis_size(EP) <= FEW_ROWS
    if is_small or (is_split and how.stationary):
        return _dense(activation, matrices, lora, h_BTI, routed[1], how)
    # Recomputed in the backward pass: the rows of all devices of ep for all layers would not fit.
    run = jax.checkpoint(partial(_grouped, activation, how), prevent_cse=False)
    return run(matrices, lora, h_BTI, routed, layer)


def is_small(model: Model) -> bool:
    """Say whether the experts of a model are too small to be worth grouping."""
    return model.n_experts * model.d_model * model.d_ff < LEAST_GROUPED


def _grouped(
    activation: str,
    how: "Pass",
    matrices: Matrices,
    lora: Factors,
    h_BTD: Array,
    routed: tuple[Int[Array, "B T C"], Float[Array, "B T X"]],
    layer: Int[Array, ""] | None,
) -> Array:
    """Return the sum of this device's experts [R, T, O], each of which runs over its own tokens only."""
    lora = {name: whole(factors) for name, factors in lora.items()}
    choices_BTC, gates_BTX = routed
    chosen_BTC = in_ascending_order(choices_BTC, gates_BTX.shape[2])
    is_its_BTCX = chosen_BTC[..., None] == jnp.arange(gates_BTX.shape[2])[None, None, None]
    weight_BTC = jnp.sum(jnp.where(is_its_BTCX, gates_BTX[:, :, None], 0), axis=3)
    d_model, width_out = model_width(lora, h_BTD), output_width(lora, h_BTD)
    if how.kernels.platform == "tpu" and width_out != d_model:
        width_out += -width_out % LANES
        h_BTD = jnp.pad(h_BTD, ((0, 0), (0, 0), (0, -h_BTD.shape[2] % LANES)))
    h_RTD, weight_RTC, chosen_RTC = (varying(gather_rows(x)) for x in (h_BTD, weight_BTC, chosen_BTC))
    local, slots = matrices["up"].shape[-3], how.expert_lora.scale_S.shape[0]
    mine_RTC = chosen_RTC - lax.axis_index(EP) * local
    (rows, length, choices), experts = chosen_RTC.shape, gates_BTX.shape[2]
    tiling = Choices(rows, length, choices, experts, local).tiling(by_tile=how.kernels.platform == "cpu")
    place = layout(tiling, mine_RTC, how.expert_lora.slots_R, local, slots)
    if layer is not None:
        place = place.replace(expert_N=place.expert_N + layer * local)
    in_place = how.expert_lora.are_joint and slot_product.is_best(how.kernels, tiling, local, slots)
    grouping = Grouping(tiling, how.kernels, d_model, width_out, activation, in_place)
    return run_experts(grouping, matrices, lora, h_RTD, weight_RTC, how.expert_lora.scale_S, place)


def in_ascending_order(choices_BTC: Int[Array, "B T C"], experts: int) -> Int[Array, "B T C"]:
    """Sort each token's choices; what is chosen twice counts once, and is then ``experts``."""
    numbers = jnp.arange(choices_BTC.shape[2])
    is_earlier_CC = numbers[None] < numbers[:, None]
    one, other = choices_BTC[..., :, None], choices_BTC[..., None, :]
    is_again_BTC = jnp.any((one == other) & is_earlier_CC[None, None], axis=-1)
    choices_BTC = jnp.where(is_again_BTC, experts, choices_BTC)
    one, other = choices_BTC[..., :, None], choices_BTC[..., None, :]
    rank_BTC = jnp.sum((other < one) | ((other == one) & is_earlier_CC[None, None]), axis=-1)
    return jnp.sum(jnp.where(rank_BTC[..., None] == numbers[None, None, None], one, 0), axis=-2).astype(
        choices_BTC.dtype
    )


def _dense(
    activation: str, matrices: Matrices, lora: Factors, h_BTD: Array, gates_BTX: Array, how: "Pass"
) -> Array:
    """Return the same of experts that run over all rows, a few experts at once."""
    h_RTD = gather_rows(h_BTD)
    gates_RTX = lax.all_to_all(gates_BTX, EP, split_axis=2, concat_axis=0, tiled=True)
    factors = {name: whole(pair) for name, pair in lora.items()}
    experts = (matrices, factors, jnp.moveaxis(gates_RTX, 2, 0))
    local = gates_RTX.shape[2]
    size = _group_size(local, max(h_RTD.size, h_RTD.size // h_RTD.shape[2] * matrices["up"].shape[2]))
    groups = jax.tree.map(lambda x: x.reshape(local // size, size, *x.shape[1:]), experts)
    # Recomputed in the backward pass: the intermediates of all experts for all tokens would not fit.
    run = jax.checkpoint(partial(_group, activation, how), prevent_cse=False)

    def add_group(sum_RTO: Array, group: tuple[Matrices, Factors, Array]) -> tuple[Array, None]:
        return sum_RTO + run(h_RTD, group), None

    nothing = jnp.zeros((*h_RTD.shape[:2], output_width(lora, h_RTD)), h_RTD.dtype)
    return lax.scan(add_group, varying(nothing), groups)[0]


def _group_size(experts: int, elements: int) -> int:
    """Return how many experts run at once, a divisor of their number."""
    size = max(1, min(experts, GROUP_ELEMENTS // elements))
    while experts % size:
        size -= 1
    return size


def _group(activation: str, how: "Pass", h_RTD: Array, group: tuple[Matrices, Factors, Array]) -> Array:
    """Return the sum of a few experts. It depends on shapes and each token's own numbers alone."""
    y_GRTD = jax.vmap(partial(_expert, activation, how, h_RTD))(*group)
    return jnp.sum(y_GRTD, axis=0)


def _expert(activation: str, how: "Pass", h_RTD: Array, w: Matrices, lora: Factors, gate_RT: Array) -> Array:
    """Run one expert over all rows. Where it was not chosen its input is zero, and so is its output."""
    is_chosen_RT1 = (gate_RT != 0)[..., None]
    x_RTD = jnp.where(is_chosen_RT1, h_RTD, jnp.zeros((), h_RTD.dtype))
    if lora["gate"].a is None:
        return _expert_of_shared(activation, how, x_RTD, w, lora) * gate_RT[..., None]
    width, apply = w["up"].shape[1], how.expert_lora.apply
    gate_RTF = _linear(how, x_RTD, w, "gate", width) + apply(x_RTD, lora["gate"])
    up_RTF = _linear(how, x_RTD, w, "up", width) + apply(x_RTD, lora["up"])
    y_RTF = gated(activation, gate_RTF, up_RTF)
    y_RTD = _linear(how, y_RTF, w, "down", h_RTD.shape[2]) + apply(y_RTF, lora["down"])
    return y_RTD * gate_RT[..., None]


def _expert_of_shared(activation: str, how: "Pass", x_RTI: Array, w: Matrices, lora: Factors) -> Array:
    """Run one expert whose input has the shared factors' results, and whose output what they take."""
    halves, width = how.expert_lora.all_halves, w["up"].shape[1]
    x_RTD, low_gate, low_up = split_input(lora, x_RTI)
    gate_RTF = _linear(how, x_RTD, w, "gate", width) + halves.high(low_gate, lora["gate"].b)
    up_RTF = _linear(how, x_RTD, w, "up", width) + halves.high(low_up, lora["up"].b)
    y_RTF = gated(activation, gate_RTF, up_RTF)
    base_RTD = _linear(how, y_RTF, w, "down", x_RTD.shape[2])
    return jnp.concatenate([base_RTD, halves.low(y_RTF, lora["down"].a)], axis=2)


def _linear(how: "Pass", x: Array, w: Matrices, name: str, width: int) -> Array:
    """Apply an expert's matrix, and its bias if there is one."""
    y, bias = how.linear(x, decoded(w[name], x.dtype), width), cast("Array | None", w.get(f"{name}_bias"))
    if bias is None:
        return y
    if name == "down":  # one of the devices whose results are summed adds it
        bias = jnp.where(lax.axis_index(TP) == 0, bias, jnp.zeros((), bias.dtype))
    return y + bias[None, None]
