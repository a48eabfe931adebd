"""The vocabulary head: hidden states to logits and to the log-probabilities of given tokens.

The vocabulary is split over tp.
Dimension key: B row, T token, K target, D model width, V vocabulary (this device's part).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from spmd_tx.models.adapters.lora import ApplyLora, Lora
from spmd_tx.models.layers import product
from spmd_tx.sharding.collectives import contract_slice, vocabulary_logsumexp
from spmd_tx.sharding.mesh import FSDP, TP


def whole(unembed_VD: Float[Array, "V _"], d_model: int) -> Float[Array, "V D"]:
    """Gather the whole width of the matrix, which pays off for many tokens."""
    if unembed_VD.shape[1] == d_model:
        return unembed_VD
    return lax.all_gather(unembed_VD, FSDP, axis=1, tiled=True)


def logits(
    unembed_VD: Float[Array, "V _"], lora: Lora[Array], apply_lora: ApplyLora, h_BTD: Float[Array, "B T D"]
) -> Float[Array, "B T V"]:
    """Return logits in fp32. A matrix whose width is split over fsdp stays in place, and the rows travel."""
    if unembed_VD.shape[1] == h_BTD.shape[2]:
        base_BTV = product("BTD,VD->BTV", h_BTD, unembed_VD)
    else:
        rows = lax.all_gather(h_BTD, FSDP, axis=0, tiled=True)
        base_BTV = contract_slice(rows, "BTD,VD->BTV", unembed_VD)
    return base_BTV + apply_lora(h_BTD, lora).astype(jnp.float32)


def top_logits(logits: Float[Array, "*N V"], count: int) -> tuple[Int[Array, "*N K"], Float[Array, "*N K"]]:
    """Return the tokens with the highest logits, and those logits, descending; ties go to the lower token.

    Devices exchange only their own best tokens. ``count`` is at most the size of the vocabulary.
    """
    part = logits.shape[-1]
    mine, tokens = lax.top_k(logits, min(count, part))
    tokens = tokens + lax.axis_index(TP) * part
    last = logits.ndim - 1
    # In the order of tp, so that ties still go to the lower token.
    everybodys = lax.all_gather(mine, TP, axis=last, tiled=True, to="invarying")
    tokens = lax.all_gather(tokens, TP, axis=last, tiled=True, to="invarying")
    best, places = lax.top_k(everybodys, count)
    return jnp.take_along_axis(tokens, places, axis=-1), best


def target_logprobs(
    logits_BTV: Float[Array, "B T V"], targets: Int[Array, "B T *K"]
) -> Float[Array, "B T *K"]:
    """Return log-probabilities, in nats, of one token per position, or of K."""
    targets_BTK = targets.reshape(*logits_BTV.shape[:2], -1)
    vocabulary = logits_BTV.shape[-1]
    local_BTK = targets_BTK - lax.axis_index(TP) * vocabulary
    take = _take_one if local_BTK.shape[-1] == 1 else _take_several
    target_BTK = lax.psum(take(vocabulary, logits_BTV, local_BTK), TP)
    return (target_BTK - vocabulary_logsumexp(logits_BTV)[..., None]).reshape(targets.shape)


def _take(logits_BTV: Array, local_BTK: Array) -> Array:
    """Return the logits of tokens of this device's part of the vocabulary; zero for others."""
    is_here_BTK = (local_BTK >= 0) & (local_BTK < logits_BTV.shape[-1])
    here_BTK = jnp.take_along_axis(logits_BTV, jnp.where(is_here_BTK, local_BTK, 0), axis=-1)
    return jnp.where(is_here_BTK, here_BTK, 0.0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take_one(vocabulary: int, logits_BTV: Array, local_BT1: Array) -> Array:
    """Do the same for one token per position.

    Its gradient compares every token with the target, in the same pass that computes the softmax's. A scatter
    would write and read the gradients of all logits once more.
    """
    return _take(logits_BTV, local_BT1)


def _forward(vocabulary: int, logits_BTV: Array, local_BTK: Array) -> tuple[Array, Array]:
    return _take(logits_BTV, local_BTK), local_BTK


def _one_backward(vocabulary: int, local_BT1: Array, grad_BT1: Array) -> tuple[Array, None]:
    token_V = jnp.arange(vocabulary, dtype=local_BT1.dtype)
    return jnp.where(token_V[None, None] == local_BT1, grad_BT1, 0.0), None


_take_one.defvjp(_forward, _one_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take_several(vocabulary: int, logits_BTV: Array, local_BTK: Array) -> Array:
    """Do the same for several tokens per position.

    Its gradient first adds what is named twice: where indices may repeat, GPUs sort them, or write one after
    the other, so that a scatter gives the same bits twice.
    """
    return _take(logits_BTV, local_BTK)


def _several_backward(vocabulary: int, local_BTK: Array, grad_BTK: Array) -> tuple[Array, None]:
    def of_token(local_K: Array, grad_K: Array) -> Array:
        number_K = jnp.arange(local_K.shape[0], dtype=local_K.dtype)
        is_same_KK = local_K[:, None] == local_K[None]
        total_K = jnp.sum(jnp.where(is_same_KK, grad_K[None], 0.0), axis=1)
        is_again_K = jnp.any(is_same_KK & (number_K[None] < number_K[:, None]), axis=1)
        is_left_out_K = is_again_K | (local_K < 0) | (local_K >= vocabulary)
        place_K = jnp.where(is_left_out_K, vocabulary + number_K, local_K)  # behind the end, and so dropped
        zeros_V = jnp.broadcast_to(jnp.zeros_like(grad_K[:1]), vocabulary)
        return zeros_V.at[place_K].set(total_K, mode="drop", unique_indices=True)

    return jax.vmap(jax.vmap(of_token))(local_BTK, grad_BTK), None


_take_several.defvjp(_forward, _several_backward)


def named_logprobs(
    logits_BTV: Float[Array, "B T V"], targets_BTK: Int[Array, "B T K"]
) -> Float[Array, "B T K"]:
    """Return target_logprobs, and 0 where the target is -1."""
    return jnp.where(targets_BTK < 0, 0.0, target_logprobs(logits_BTV, targets_BTK))
