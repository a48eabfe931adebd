"""Attention among the patches of one image, by the implementation that is chosen: the reference, or kernels.

NVIDIA GPUs have cuDNN's, and TPUs that of flash.py. They are used only where worker/self_tests/images.py has
found their results correct on the device.

Dimension key as in tower.py; patches from a given number on are not there.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from spmd_tx.models.layers import product
from spmd_tx.models.vision import flash
from spmd_tx.protocol.kernels import Kernels, Platform

SCORES = 2**21  # of a head that the reference holds at once
FARTHEST = -1e30  # the score of a patch that is not there

Heads = Float[Array, "N H E"]


def attend(kernels: Kernels, q_NHE: Heads, k_NHE: Heads, v_NHE: Heads, count: Array) -> Heads:
    """Attend from all patches to the first ``count``, int32 [], before and behind. Scores are in fp32."""
    return IMPLEMENTATIONS[kernels.images](q_NHE, k_NHE, v_NHE, count, kernels.interpret)


def candidates(platform: Platform, sees: bool, is_bfloat16: bool) -> list[str]:
    """List the implementations that there are, the fastest first; the reference is always last."""
    fastest = {"gpu": ["cudnn"], "tpu": ["mosaic"]}.get(platform, [])
    return [*(fastest if sees and is_bfloat16 else []), "reference"]


def queries_at_once(patches: int) -> int:
    """Return how many patches of so many attend at once in the reference: both are powers of two."""
    return min(patches, max(1, SCORES // patches))


def _reference(q_NHE: Heads, k_NHE: Heads, v_NHE: Heads, count: Array, _: bool) -> Heads:
    """Hold the scores of some queries at a time."""
    scale, is_there_N = q_NHE.shape[-1] ** -0.5, jnp.arange(q_NHE.shape[0]) < count

    def some(q_QHE: Array) -> Array:
        scores_HQN = product("QHE,NHE->HQN", q_QHE, k_NHE) * scale
        scores_HQN = jnp.where(is_there_N[None, None], scores_HQN, FARTHEST)
        shares_HQN = jax.nn.softmax(scores_HQN, axis=-1).astype(v_NHE.dtype)
        return product("HQN,NHE->QHE", shares_HQN, v_NHE).astype(v_NHE.dtype)

    parts = q_NHE.reshape(-1, queries_at_once(len(q_NHE)), *q_NHE.shape[1:])
    return lax.map(some, parts).reshape(q_NHE.shape)


def _cudnn(q_NHE: Heads, k_NHE: Heads, v_NHE: Heads, count: Array, _: bool) -> Heads:
    """Call cuDNN through JAX's public function. Without patches it sees one, and nobody reads the tokens."""
    there_1 = jnp.maximum(count, 1).astype(jnp.int32)[None]
    y_1NHE = jax.nn.dot_product_attention(
        *(x_NHE[None] for x_NHE in (q_NHE, k_NHE, v_NHE)),
        key_value_seq_lengths=there_1,
        implementation="cudnn",
    )
    return y_1NHE[0]


def _mosaic(q_NHE: Heads, k_NHE: Heads, v_NHE: Heads, count: Array, interpret: bool) -> Heads:
    return flash.attend(q_NHE, k_NHE, v_NHE, count, interpret=interpret)


# (queries, keys, values, count, Kernels.interpret) -> results
IMPLEMENTATIONS: dict[str, Callable[[Heads, Heads, Heads, Array, bool], Heads]] = {
    "cudnn": _cudnn,
    "mosaic": _mosaic,
    "reference": _reference,
}
