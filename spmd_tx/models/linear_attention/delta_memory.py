"""The delta rule (delta_rule.py) for one token per row, on memories that stay in their pool. For NVIDIA GPUs.

A kernel reads each memory once and writes it once. XLA would take the memories out of the pool first, read
them twice, and put them back.

Dimension key: L layer with a memory, P slot, B row, H head of values, E width of a key, V width of a value.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jaxtyping import Float

from spmd_tx.models.pallas import output, run_triton
from spmd_tx.sharding.tree_node import TreeNode, static

NOTHING = 0  # the slot that is never written
COLUMNS = 32  # at most, of a memory, that one program computes; they do not depend on each other
LEAST_COLUMNS, MOST_ROWS = 16, 256


class InPool(TreeNode):
    """Says where a layer's memories of rows are, and where they are to be written."""

    pool: Any  # float32 [L, P, H, E, V]
    layer: Any  # int32
    sources_B: Any  # int32
    targets_B: Any  # int32; 0: nowhere. No two others may be the same, and none the source of another row
    interpret: bool = static(default=False)  # as in Kernels


def fits(memory_shape: tuple[int, ...]) -> bool:
    """Say whether the kernel takes memories of a shape [..., E, V]."""
    height, width = memory_shape[-2:]
    return height == height & -height <= MOST_ROWS and width & -width >= LEAST_COLUMNS


def read_token(
    q_BHE: Float[Array, "B H E"],
    k_BHE: Float[Array, "B H E"],
    v_BHV: Float[Array, "B H V"],
    decay_BH: Float[Array, "B H"],
    strength_BH: Float[Array, "B H"],
    memory: InPool,
) -> tuple[Float[Array, "B H V"], Float[Array, "L P H E V"]]:
    """Return the results, and the pool with the memories after them. All but the pool's slots is fp32.

    Queries and keys are as the rule takes them; the decay is what a memory is multiplied by.
    """
    pool = memory.pool
    b, heads, width = v_BHV.shape
    columns = min(COLUMNS, width & -width)

    def kernel(layer_ref: Any, source_ref: Any, target_ref: Any, *refs: Any) -> None:
        q_ref, k_ref, v_ref, decay_ref, strength_ref, pool_ref, y_ref, after_ref = refs
        row, head, own = pl.program_id(2), pl.program_id(1), pl.ds(pl.program_id(0) * columns, columns)
        layer, target, k_E1 = layer_ref[0], target_ref[row], k_ref[row, head][:, None]
        memory_EV = pool_ref[layer, source_ref[row], head, :, own] * decay_ref[row, head]
        known_V = jnp.sum(memory_EV * k_E1, axis=0)
        new_V = strength_ref[row, head] * (v_ref[row, head, own] - known_V)
        memory_EV = memory_EV + k_E1 * new_V[None]
        y_ref[row, head, own] = jnp.sum(memory_EV * q_ref[row, head][:, None], axis=0)

        @pl.when(target != NOTHING)
        def _() -> None:
            after_ref[layer, target, head, :, own] = memory_EV

    arguments = (
        *(memory.layer[None], memory.sources_B, memory.targets_B),
        *(q_BHE, k_BHE, v_BHV, decay_BH, strength_BH, pool),
    )
    numbers = b * heads * pool.shape[3] * width
    y_BHV, pool = run_triton(
        kernel,
        arguments,
        8 * numbers,
        2 * numbers * pool.dtype.itemsize,
        interpret=memory.interpret,
        warps=4,
        stages=1,
        out_shape=[output(v_BHV.shape, jnp.float32, v_BHV), output(pool.shape, pool.dtype, pool)],
        grid=(width // columns, heads, b),
        input_output_aliases={len(arguments) - 1: 1},
        name="delta_memory",
    )
    return y_BHV, pool
