"""The feed-forward block of a layer: gated, or a mixture of experts.

Dimension key as in backbone.py.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from spmd_tx.models.activations import gated
from spmd_tx.models.adapters import lora
from spmd_tx.models.checkpoint.packed import Matrix
from spmd_tx.models.declared.channels import Glu, Mixture
from spmd_tx.models.experts import moe
from spmd_tx.models.experts.routing import route
from spmd_tx.models.gates import open_by
from spmd_tx.models.layer_pass import LayerPass
from spmd_tx.models.layers import product
from spmd_tx.models.long_rows import in_parts, parts_of
from spmd_tx.models.named import Named
from spmd_tx.sharding.mesh import FSDP, TP

EXPERTS = ("gate", "up", "down")  # the maps of a mixture's experts


def feed_forward(layer: LayerPass, x_BTD: Array, replayed_BTC: Array | None) -> tuple[Array, Array | None]:
    """Run the gated block, or a mixture, with its residual; return chosen experts, too."""
    channel, level = layer.place.layer.channel, layer.how.remat
    h_BTD = layer.norm(x_BTD, "mlp_norm")
    names = [name for name in layer.lora if layer.model.adapted[layer.place.name(name)].group == "mlp"]
    parts = parts_of(h_BTD.shape[1], level) if names else 1  # trained matrices sum over all tokens at once
    if level is None or parts == 1:
        y_BTD, choices_BTC = _channel(layer, h_BTD, replayed_BTC)
    else:
        split: dict[str, Any] = {name: _gathered(layer, name) for name in names if name in layer.w}
        gathered = replace(layer, w=layer.w.with_(split))

        def run(factors: dict[str, Any], *part: Any) -> tuple[Array, Array | None]:
            return _channel(replace(gathered, lora=Named(factors)), *part)

        factors = {name: layer.lora[name] for name in names}
        y_BTD, choices_BTC = in_parts(run, parts, level, factors, h_BTD, replayed_BTC)
    y_BTD = layer.how.reduce(y_BTD)
    if isinstance(channel, Glu):
        y_BTD = layer.biased(y_BTD, channel.prefix + "down")
    return x_BTD + y_BTD, choices_BTC


def _gathered(layer: LayerPass, name: str) -> Matrix:
    """Return a matrix that fsdp may split whole, so that it is gathered once for all parts of the rows."""
    widths, matrix = lora.local_widths(layer.model, layer.place.name(name), lax.axis_size(TP)), layer.w[name]
    for axis, width in zip((matrix.ndim - 2, matrix.ndim - 1), widths, strict=True):
        if matrix.shape[axis] != width:
            gather = partial(lax.all_gather, axis_name=FSDP, axis=axis, tiled=True)
            matrix = jax.tree.map(gather, matrix)
    return matrix


def _channel(layer: LayerPass, h_BTD: Array, replayed_BTC: Array | None) -> tuple[Array, Array | None]:
    """Return what a feed-forward block adds to its tokens, to be summed over tp, and chosen experts."""
    channel = layer.place.layer.channel
    if isinstance(channel, Mixture):
        return _mixture(layer, channel, h_BTD, replayed_BTC)
    assert isinstance(channel, Glu)
    return layer.linear(_gated(layer, channel, h_BTD), channel.prefix + "down", layer.model.d_model), None


def _gated(layer: LayerPass, channel: Glu, h_BTD: Array) -> Array:
    """Return what the down projection of a gated block takes (Shazeer 2020), [B, T, F]."""
    gate_BTF = checkpoint_name(layer.columns(h_BTD, channel.prefix + "gate"), "gate")
    up_BTF = checkpoint_name(layer.columns(h_BTD, channel.prefix + "up"), "up")
    return gated(channel.activation, gate_BTF, up_BTF)


def _mixture(
    layer: LayerPass, channel: Mixture, h_BTD: Array, replayed_BTC: Array | None
) -> tuple[Array, Array]:
    """Return the sum of a token's experts and the shared one, to be summed over tp, and the choices."""
    w = layer.w
    bias_X, correction_X = (getattr(w, name, None) for name in ("router_bias", "correction"))
    routed = route(channel.route, channel.chosen, w.router, h_BTD, replayed_BTC, bias_X, correction_X)
    is_stacked = "up" in layer.stack
    matrices, number = experts_of(layer.stack if is_stacked else w), layer.number if is_stacked else None
    factors = {name: layer.lora[name] for name in EXPERTS}
    y_BTD = moe.mixture(matrices, factors, h_BTD, routed, layer.how, number, channel.activation)
    if channel.shared is not None:
        hidden_BTF = _gated(layer, channel.shared, h_BTD)
        shared_BTD = layer.linear(hidden_BTF, channel.shared.prefix + "down", layer.model.d_model)
        if channel.shared_gate is not None:
            shared_BTD = open_by(shared_BTD, product("BTD,DO->BTO", h_BTD, w.shared_expert_gate))
        y_BTD += shared_BTD
    return y_BTD, routed[0]


def experts_of(w: Named[Array] | moe.Matrices) -> moe.Matrices:
    """Return the experts' matrices, and their biases where they have some."""
    names = (*EXPERTS, *(f"{name}_bias" for name in EXPERTS))
    return {name: w[name] for name in names if name in w}
