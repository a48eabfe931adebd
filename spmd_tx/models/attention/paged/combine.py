"""Combines what parts of a row's pages gave, on NVIDIA GPUs: a kernel that reads the parts in use alone.

Dimension key as in queries.py; U part, H columns of a head.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from spmd_tx.models.attention.paged.queries import LOWEST
from spmd_tx.models.pallas import output, run_triton

Found = tuple[
    Array, Array, Array
]  # highest score [U, B, K, R], total [U, B, K, R], sum [U, B, K, R, E], fp32


def combined(
    found: Found,
    used_B: Int[Array, " B"],
    sinks_KR: Float[Array, "K R"] | None,
    *,
    queries: int,
    ranges: list[tuple[int, int]],
    dtype: DTypeLike,
    usual_parts: int,
    interpret: bool,
) -> Float[Array, "B K R E"]:
    """Return the weighted sums of all parts, ``queries`` of a row by each program.

    Of a row only its first ``used_B`` parts have been written; they are added in their order. Sinks count as
    a part that comes before them and adds nothing. ``ranges`` are where a head's columns are divided.
    """
    from jax.experimental.pallas import triton as plgpu

    highest_UBKR, _, sum_UBKRE = found
    parts, rows, heads, count = highest_UBKR.shape
    flat = [x.reshape(-1, *x.shape[2:]) for x in found]  # rows, part by part
    arrays = [used_B, *flat, *([] if sinks_KR is None else [sinks_KR])]

    def kernel(used_ref: Any, highest_ref: Any, total_ref: Any, sum_ref: Any, *refs: Any) -> None:
        *sinks_ref, y_ref = refs
        head, row = pl.program_id(1), pl.program_id(2)
        its = pl.ds(pl.program_id(0) * queries, queries)
        used = used_ref[row]

        def load(ref: Any, part: int, *columns: Any, other: float = 0.0) -> Array:
            shape = (queries, *(each.size for each in columns))
            is_used = jnp.broadcast_to(part < used, shape)
            at = part * rows + row, head, its, *columns
            return plgpu.load(ref.at[at], mask=is_used, other=other)

        highest_UQ = [load(highest_ref, part, other=LOWEST) for part in range(parts)]
        most_Q = sinks_ref[0][head, its] if sinks_ref else highest_UQ[0]
        total_Q = jnp.ones_like(most_Q) if sinks_ref else jnp.zeros_like(most_Q)
        sink_Q = most_Q
        for highest_Q in highest_UQ:
            most_Q = jnp.maximum(most_Q, highest_Q)
        total_Q *= jnp.exp(sink_Q - most_Q)
        share_UQ = [jnp.exp(highest_Q - most_Q) for highest_Q in highest_UQ]
        for part, share_Q in enumerate(share_UQ):
            total_Q += load(total_ref, part) * share_Q
        total_Q = jnp.maximum(total_Q, 1.0)  # the highest score adds 1
        for begin, size in ranges:
            columns = pl.ds(begin, size)
            sum_QH = jnp.zeros((queries, size), jnp.float32)
            for part, share_Q in enumerate(share_UQ):
                sum_QH += load(sum_ref, part, columns) * share_Q[:, None]
            y_ref[row, head, its, columns] = (sum_QH / total_Q[:, None]).astype(y_ref.dtype)

    numbers = sum_UBKRE[0].size
    moved = usual_parts * sum(x[0].nbytes for x in found) + numbers * jnp.dtype(dtype).itemsize
    return run_triton(
        kernel,
        arrays,
        2 * usual_parts * numbers,
        moved,
        interpret=interpret,
        warps=4,
        stages=1,
        out_shape=output((rows, heads, count, sum_UBKRE.shape[4]), dtype, sum_UBKRE),
        grid=(count // queries, heads, rows),
        name="combine_parts",
    )
