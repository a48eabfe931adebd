"""Chooses the experts of each token and weighs them, in every way that a Route declares.

Dimension key: B row, T token, D model width, X expert, C choice, G group of experts.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from spmd_tx.models.declared.route import Route
from spmd_tx.models.experts.top_k import top_k
from spmd_tx.models.layers import product


def route(
    how: Route,
    chosen: int,
    router_DX: Float[Array, "D X"],
    h_BTD: Float[Array, "B T D"],
    replayed_BTC: Int[Array, "B T C"] | None,
    bias_X: Float[Array, " X"] | None = None,
    correction_X: Float[Array, " X"] | None = None,
) -> tuple[Int[Array, "B T C"], Float[Array, "B T X"]]:
    """Return the experts of each token, and every expert's weight for it: 0 where it was not chosen.

    ``bias_X`` belongs to the router. ``correction_X`` is added to scores for the choice alone (Wang et al.
    2024). Replayed choices are taken as given; -1 lets the router choose. The weights are always the router's
    own, so that its gradient stays the same.
    """
    logits_BTX = product("BTD,DX->BTX", h_BTD, router_DX)
    if bias_X is not None:
        logits_BTX = logits_BTX + bias_X.astype(jnp.float32)[None, None]
    score_BTX = _scores(how, logits_BTX)
    wanted_BTX = lax.stop_gradient(score_BTX)
    if correction_X is not None:
        wanted_BTX = wanted_BTX + correction_X.astype(jnp.float32)[None, None]
    if how.groups > 1:
        wanted_BTX = _in_best_groups(how, wanted_BTX)
    choices_BTC = top_k(wanted_BTX, chosen)[1]
    if replayed_BTC is not None:
        replayed_BTC = replayed_BTC.astype(choices_BTC.dtype)
        choices_BTC = jnp.where(replayed_BTC >= 0, replayed_BTC, choices_BTC)
    numbers_X = jnp.arange(router_DX.shape[1])[None, None, None]
    is_chosen_BTX = jnp.any(choices_BTC[..., None] == numbers_X, axis=-2)
    gates_BTX = _weights(how, score_BTX, is_chosen_BTX)
    return choices_BTC, gates_BTX.astype(h_BTD.dtype)


def _scores(how: Route, logits_BTX: Array) -> Array:
    if how.score == "sigmoid":
        return jax.nn.sigmoid(logits_BTX)
    return logits_BTX if how.chosen_first else jax.nn.softmax(logits_BTX, axis=-1)


def _in_best_groups(how: Route, wanted_BTX: Array) -> Array:
    """Leave the experts of the best groups as they are, and rule out all others."""
    wanted_BTGX = wanted_BTX.reshape(*wanted_BTX.shape[:2], how.groups, -1)
    best = min(how.best_of_group, wanted_BTGX.shape[3])
    rank_BTG = jnp.sum(top_k(wanted_BTGX, best)[0], axis=-1)
    kept = top_k(rank_BTG, how.kept_groups)[1]
    is_kept_BTG = jnp.any(kept[..., None] == jnp.arange(how.groups)[None, None, None], axis=-2)
    return jnp.where(is_kept_BTG[..., None], wanted_BTGX, -jnp.inf).reshape(wanted_BTX.shape)


def _weights(how: Route, score_BTX: Array, is_chosen_BTX: Array) -> Array:
    if how.chosen_first:
        gates_BTX = jax.nn.softmax(jnp.where(is_chosen_BTX, score_BTX, -jnp.inf), axis=-1)
    else:
        gates_BTX = jnp.where(is_chosen_BTX, score_BTX, 0.0)
    if how.normalise and not how.chosen_first:
        total_BT1 = jnp.sum(gates_BTX, axis=-1, keepdims=True)
        gates_BTX = gates_BTX / jnp.maximum(total_BT1, jnp.finfo(jnp.float32).tiny)
    return gates_BTX if how.factor == 1.0 else gates_BTX * how.factor
