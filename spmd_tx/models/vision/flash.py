"""Flash attention among the patches of one image for TPUs, as a Pallas kernel (Dao et al. 2022).

Scores exist for one block of queries and one block of keys at a time, as [keys, queries], so that the numbers
of queries are vectors [1, queries]. Blocks of patches that are not there are neither read nor computed.

Dimension key as in tower.py; Q query and S key of a block, I blocks, W lanes of all heads.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float

from spmd_tx.models.pallas import dot, output

BLOCK = 512  # patches
LANES = 128  # numbers in a row of a vector register
MASKED = -1e30  # the score of a patch that is not there


def attend(
    q_NHE: Float[Array, "N H E"],
    k_NHE: Float[Array, "N H E"],
    v_NHE: Float[Array, "N H E"],
    count: Array,
    *,
    interpret: bool = False,
) -> Float[Array, "N H E"]:
    """Attend from all patches to the first ``count``, with scores and softmax in fp32.

    ``interpret`` is that of Kernels. What patches get that are not there means nothing.
    """
    from jax.experimental.pallas import tpu as pltpu

    patches, heads, width = q_NHE.shape
    block, wide = min(BLOCK, patches), width + -width % LANES
    blocks, scale = patches // block, width**-0.5

    def flat(x_NHE: Array) -> Array:  # heads beside each other; zeros fill them up and change no score
        return jnp.pad(x_NHE, ((0, 0), (0, 0), (0, wide - width))).reshape(patches, -1)

    def kernel(count: Any, q: Any, k: Any, v: Any, y: Any, *held: Any) -> None:
        (peak, total, result), other = held, pl.program_id(2)

        @pl.when(other == 0)
        def _begin() -> None:
            peak[...] = jnp.full(peak.shape, MASKED, jnp.float32)
            total[...] = jnp.zeros(total.shape, jnp.float32)
            result[...] = jnp.zeros(result.shape, jnp.float32)

        @pl.when(other * block < count[0])
        def _add() -> None:
            scores_SQ = dot(k[...], q[...], 1, 1) * scale
            key_SQ = other * block + lax.broadcasted_iota(jnp.int32, scores_SQ.shape, 0)
            scores_SQ = jnp.where(key_SQ < count[0], scores_SQ, MASKED)
            peak_1Q = jnp.maximum(peak[...], jnp.max(scores_SQ, axis=0, keepdims=True))
            weights_SQ, shrink_1Q = jnp.exp(scores_SQ - peak_1Q), jnp.exp(peak[...] - peak_1Q)
            total[...] = total[...] * shrink_1Q + jnp.sum(weights_SQ, axis=0, keepdims=True)
            result[...] = result[...] * shrink_1Q + dot(v[...], weights_SQ.astype(v.dtype), 0, 0)
            peak[...] = peak_1Q

        @pl.when(other == blocks - 1)
        def _end() -> None:
            y[...] = (result[...] / total[...]).T.astype(y.dtype)

    def key_block(head: Any, mine: Any, other: Any, count: Any) -> tuple[Any, ...]:
        return jnp.minimum(other, (count[0] - 1) // block), head

    queries = pl.BlockSpec((block, wide), lambda head, mine, other, count: (mine, head))
    keys = pl.BlockSpec((block, wide), key_block)
    shapes = (1, block), (1, block), (wide, block)
    call = pl.pallas_call(
        kernel,
        out_shape=output((patches, heads * wide), q_NHE.dtype, q_NHE),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(heads, blocks, blocks),
            in_specs=[queries, keys, keys],
            out_specs=queries,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in shapes],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=4 * heads * patches * patches * wide,
            transcendentals=heads * patches * patches,
            bytes_accessed=2 * heads * patches * wide * (1 + blocks) * q_NHE.dtype.itemsize,
        ),
        interpret=interpret,
        name="attention_of_patches",
    )
    there_1 = jnp.maximum(count, 1).astype(jnp.int32)[None]
    y_NW: Any = call(there_1, flat(q_NHE), flat(k_NHE), flat(v_NHE))
    return y_NW.reshape(patches, heads, wide)[..., :width]
