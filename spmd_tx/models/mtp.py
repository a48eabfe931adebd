"""Multi-token prediction (DeepSeek-AI 2024, section 2.2): a layer that expects the token after the next one.

It takes a token's last hidden state and the embedding of the token that follows, and attends to what it has
had of the tokens before. Its pages lie behind those of the model's layers, in the same places. What it keeps
of a token is written by whatever reads the token, so that it can begin to make drafts anywhere.

It has no adapter: it reads hidden states of the adapted model, and its own go through the adapted head.

Dimension key as in backbone.py.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from spmd_tx.models.adapters.lora import Adapters
from spmd_tx.models.backbone import MIXERS
from spmd_tx.models.base_weights import Weights
from spmd_tx.models.declared.channels import Mixture
from spmd_tx.models.declared.model import Model
from spmd_tx.models.declared.mtp import JOINS
from spmd_tx.models.feed_forward import EXPERTS, feed_forward
from spmd_tx.models.forward_pass import Pass
from spmd_tx.models.layer_pass import LayerPass, norm
from spmd_tx.models.layers import embed
from spmd_tx.models.named import Named
from spmd_tx.sharding.mesh import TP


def read(
    model: Model,
    base: Weights[Array],
    adapters: Adapters[Any],
    h_BTD: Float[Array, "B T D"],
    next_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    how: Pass,
    cache: Any,
) -> tuple[Float[Array, "B T D"], Any]:
    """Return hidden states before the vocabulary head (all T on every device), and the cache.

    ``h_BTD`` are those of the model. XLA leaves out whatever is not needed, if it is for the cache alone.
    """
    declared, w = model.mtp, base.mtp
    assert declared is not None
    assert isinstance(w, Named)
    place = replace(model.places[-1], layer=declared)  # which it is like
    layer = LayerPass(model, place, w, _no_factors(model, adapters), how, {}, None)
    e_BTD = how.gather(how.reduce(embed(base.embed, next_BT, model.d_model)))
    parts = norm(e_BTD, w.embedding_norm, declared.norm), norm(h_BTD, w.hidden_norm, declared.norm)
    joined_BTI = jnp.concatenate(parts, axis=2)
    width = joined_BTI.shape[2] // lax.axis_size(TP)
    own_BTI = lax.dynamic_slice_in_dim(joined_BTI, lax.axis_index(TP) * width, width, axis=2)
    x_BTD = layer.rows(own_BTI, JOINS)
    index = jnp.int32(model.n_paged)
    x_BTD, cache = MIXERS[type(declared.mixer)](layer, x_BTD, positions_BT, index, cache)
    x_BTD, _ = feed_forward(layer, x_BTD, None)
    return how.gather(norm(x_BTD, w.final_norm, declared.norm)), cache


def _no_factors(model: Model, adapters: Adapters[Any]) -> Named[Any]:
    """Return factors of zeros for experts, which always take some: like those of the model's last layer."""
    place = model.places[-1]
    if not isinstance(place.layer.channel, Mixture):
        return Named({})
    return Named({name: _zeros(adapters.layers[place.name(name)]) for name in EXPERTS})


def _zeros(factors: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros_like(x[0]), factors)
