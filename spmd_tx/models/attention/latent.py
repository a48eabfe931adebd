"""Latent attention (MLA, DeepSeek-AI 2024): all heads share one short vector per token.

Keys and values follow from it. A page keeps it, normed, and one rotated key that all heads share. Training
expands it to keys and values. Sampling instead multiplies queries by the expansion of keys, so that it reads
the pages as they are: all heads then share one key, whose first part is the value as well.

Dimension key: B row, T token, S source token, N heads, R rank of pages, C width of pages (R + rotated key),
E width of keys and queries, V width of values.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from spmd_tx.models.attention.rope import grow_queries, rotate
from spmd_tx.models.declared.latent import Latent
from spmd_tx.models.layers import product, rms_norm


def place_queries(
    latent: Latent, q_BTNE: Float[Array, "B T N E"], positions_BT: Int[Array, "B T"]
) -> Float[Array, "B T N E"]:
    """Rotate the last numbers of each head's query."""
    plain, rotated = q_BTNE[..., : latent.nope], q_BTNE[..., latent.nope :]
    q_BTNE = jnp.concatenate([plain, rotate(rotated, positions_BT, latent.rope)], axis=-1)
    return grow_queries(q_BTNE, positions_BT, latent.rope)


def compress(
    latent: Latent,
    kv_BTC: Float[Array, "B T C"],
    norm_R: Float[Array, " R"],
    positions_BT: Int[Array, "B T"],
) -> Float[Array, "B T C"]:
    """Return what pages keep, from the outputs of kv_a."""
    short, key = kv_BTC[..., : latent.kv_rank], kv_BTC[..., latent.kv_rank :]
    key = rotate(key[:, :, None], positions_BT, latent.rope)[:, :, 0]
    return jnp.concatenate([rms_norm(short, norm_R, latent.eps), key], axis=-1)


def expand(
    latent: Latent, pages_BSC: Float[Array, "B S C"], kv_b_RH: Float[Array, "R H"]
) -> tuple[Float[Array, "B S N E"], Float[Array, "B S N V"]]:
    """Return keys and values of the heads whose columns ``kv_b_RH`` has."""
    short, shared = pages_BSC[..., : latent.kv_rank], pages_BSC[..., latent.kv_rank :]
    both = (short @ kv_b_RH).reshape(*short.shape[:2], -1, latent.nope + latent.value)
    shared = jnp.broadcast_to(shared[:, :, None], (*both.shape[:3], latent.rope_width))
    keys = jnp.concatenate([both[..., : latent.nope], shared], axis=-1)
    return keys, both[..., latent.nope :]


def absorb(
    latent: Latent, q_BTNE: Float[Array, "B T N E"], kv_b_RH: Float[Array, "R H"]
) -> Float[Array, "B T N C"]:
    """Return queries for pages: their scores with pages are those of ``q_BTNE`` with the expanded keys.

    Attention divides scores by the root of the pages' width; these queries make up for it.
    """
    plain, rotated = q_BTNE[..., : latent.nope], q_BTNE[..., latent.nope :]
    keys_RNE = _by_head(latent, kv_b_RH)[..., : latent.nope]
    absorbed = product("BTNE,RNE->BTNR", plain, keys_RNE)
    absorbed = jnp.concatenate([absorbed, rotated.astype(jnp.float32)], axis=-1)
    return (absorbed * (latent.scale * latent.width**0.5)).astype(q_BTNE.dtype)


def expand_result(
    latent: Latent, y_BTNR: Float[Array, "B T N R"], kv_b_RH: Float[Array, "R H"]
) -> Float[Array, "B T N V"]:
    """Return the heads' weighted sums of values, from those of the pages' first part."""
    values_RNV = _by_head(latent, kv_b_RH)[..., latent.nope :]
    return product("BTNR,RNV->BTNV", y_BTNR, values_RNV).astype(y_BTNR.dtype)


def _by_head(latent: Latent, kv_b_RH: Array) -> Array:
    return kv_b_RH.reshape(latent.kv_rank, -1, latent.nope + latent.value)
