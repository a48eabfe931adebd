"""Flash attention for NVIDIA GPUs: causal attention within packed segments, as Pallas kernels for Triton.

Memory grows with the length of rows alone (Dao et al. 2023). cuDNN's backward pass for packed rows needs room
for every pair of tokens of every possible segment if it is to give the same bits twice: 147 GiB for 8 rows of
2,048 tokens with 32 heads. Here keys own the sums of their gradients, so that nothing is added in an order
that may vary. Blocks of tokens that share no segment are neither read nor computed.

Kernels hold scores as [queries, keys], those of keys' gradients as [keys, queries]. Scores and their log-sums
are in base 2.

Dimension key: B row, T token, N heads, K key-value heads, E head width, Q queries and S keys of a block, I
block of queries, J block of keys.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from spmd_tx.models.pallas import dot, output, run_triton
from spmd_tx.sharding.tree_node import TreeNode

KEYS = 64  # of a block
QUERIES = 128  # of a block, but for the gradients of keys; half as many in wide heads and short rows
OF_KEYS = 64  # queries of a block in the gradients of keys
WIDTHS = (16, 32, 64, 128, 256)  # powers of two, of which tensor cores take no fewer than 16
WIDE = 128  # heads beyond this many columns leave room for smaller blocks
MASKED = -1e30  # not -inf: a query may have no key in the first of its blocks
LOG2E = math.log2(math.e)


class SeenKeys(TreeNode):
    """Holds what the segments say, once for all layers."""

    start_BT: Any  # int32: the first token that a token sees
    first_BI: Any  # int32: the first block of keys that a block of queries sees
    end_BJ: Any  # int32: the block of queries behind the last that sees a block of keys


def can_have(length: int, width: int) -> bool:
    """Return whether there are kernels for rows of this length and heads of this width."""
    return length % KEYS == 0 and width in WIDTHS


def place_of(start_BT: Int[Array, "B T"], width: int) -> SeenKeys:
    """Return which blocks see each other, from the first token that each token sees, which never falls."""
    length = start_BT.shape[1]
    block = _queries(length, width)
    last_J = jnp.arange(KEYS - 1, length, KEYS, dtype=jnp.int32)
    seen_BJ = jnp.sum(start_BT[:, None] <= last_J[None, :, None], axis=2, dtype=jnp.int32)
    return SeenKeys(start_BT, start_BT[:, ::block] // KEYS, (seen_BJ + OF_KEYS - 1) // OF_KEYS)


def _queries(length: int, width: int) -> int:
    """Return the queries of a block."""
    return QUERIES if width <= WIDE and length % QUERIES == 0 else QUERIES // 2


def attend_blocks(
    q_BTNE: Float[Array, "B T N E"],
    k_BTKE: Float[Array, "B T K E"],
    v_BTKE: Float[Array, "B T K E"],
    place: SeenKeys,
    sinks_N: Float[Array, " N"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "B T N E"]:
    """Attend from every token to those that it sees, with scores and softmax in fp32.

    Sinks are those of blockwise.attend_segments. ``interpret`` is that of Kernels.
    """
    y: Any = _attend(interpret, q_BTNE, k_BTKE, v_BTKE, place, sinks_N)
    return y


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(interpret: bool, q: Array, k: Array, v: Array, place: SeenKeys, sinks_N: Array | None) -> Array:
    return _forward(interpret, q, k, v, place, sinks_N)[0]


def _kept(
    interpret: bool, q: Array, k: Array, v: Array, place: SeenKeys, sinks_N: Array | None
) -> tuple[Array, tuple[Any, ...]]:
    # Named here, not by the caller: the backward pass reads these very arrays (remat.REMAT_LEVELS).
    y, sums = (checkpoint_name(x, "attended") for x in _forward(interpret, q, k, v, place, sinks_N))
    return y, (q, k, v, place, y, sums)


def _forward(
    interpret: bool, q: Array, k: Array, v: Array, place: SeenKeys, sinks_N: Array | None
) -> tuple[Array, Array]:
    """Return the result, and the log-sum of each query's scores [B, N, T]."""
    b, length, heads, width = q.shape
    block, group = _queries(length, width), heads // k.shape[2]
    sinks = [] if sinks_N is None else [sinks_N.astype(jnp.float32) * LOG2E]

    def kernel(start: Any, first: Any, q: Any, k: Any, v: Any, *others: Any) -> None:
        *of_head, y, sums = others
        mine, head, row = (pl.program_id(axis) for axis in range(3))
        queries = pl.ds(mine * block, block)
        q_QE, start_Q = q[row, queries, head, :], start[row, queries]
        order_Q = mine * block + jnp.arange(block, dtype=jnp.int32)

        def add(other: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            peak_Q, total_Q, sum_QE = carry
            keys = pl.ds(other * KEYS, KEYS)
            scores_QS = dot(q_QE, k[row, keys, head // group, :], 1, 1) * (width**-0.5 * LOG2E)
            scores_QS = jnp.where(_seen(start_Q, order_Q, other), scores_QS, MASKED)
            new_Q = jnp.maximum(peak_Q, jnp.max(scores_QS, axis=1))
            shrink_Q, weights_QS = jnp.exp2(peak_Q - new_Q), jnp.exp2(scores_QS - new_Q[:, None])
            values = v[row, keys, head // group, :]
            sum_QE = sum_QE * shrink_Q[:, None] + dot(weights_QS.astype(values.dtype), values)
            return new_Q, total_Q * shrink_Q + jnp.sum(weights_QS, axis=1), sum_QE

        nothing_Q = jnp.zeros((block,), jnp.float32)
        peak_Q = nothing_Q + (of_head[0][head] if of_head else MASKED)
        begin = peak_Q, nothing_Q + len(of_head), jnp.zeros((block, width), jnp.float32)
        end = (mine + 1) * (block // KEYS)
        peak_Q, total_Q, sum_QE = lax.fori_loop(first[row, mine], end, add, begin)
        y[row, queries, head, :] = (sum_QE / total_Q[:, None]).astype(y.dtype)
        sums[row, head, queries] = peak_Q + jnp.log2(total_Q)

    outputs = [output(q.shape, q.dtype, q), output((b, heads, length), jnp.float32, q)]
    grid = (length // block, heads, b)
    arrays, warps = (place.start_BT, place.first_BI, q, k, v, *sinks), 8 if block * width > 8192 else 4
    how: Any = {"grid": grid, "warps": warps, "interpret": interpret, "name": "attention_forward"}
    y, sums = _run(kernel, arrays, 2, outputs, **how)
    return y, sums


def _backward(interpret: bool, kept: tuple[Any, ...], slope: Array) -> tuple[Any, ...]:
    q, k, v, place, y, sums = kept
    of_tokens = jnp.sum(slope.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)
    arrays = q, k, v, slope.astype(q.dtype), sums, of_tokens.swapaxes(1, 2)
    return _grad_queries(interpret, place, arrays), *_grad_keys(interpret, place, arrays), None, None


def _grad_queries(interpret: bool, place: SeenKeys, arrays: tuple[Array, ...]) -> Array:
    """Return the gradient of the queries."""
    q, k = arrays[:2]
    b, length, heads, width = q.shape
    block, group = _queries(length, width), heads // k.shape[2]

    def kernel(start: Any, first: Any, q: Any, k: Any, v: Any, slope: Any, *others: Any) -> None:
        sums, slopes, grad_q = others
        mine, head, row = (pl.program_id(axis) for axis in range(3))
        queries = pl.ds(mine * block, block)
        q_QE, start_Q, slope_QE = q[row, queries, head, :], start[row, queries], slope[row, queries, head, :]
        sums_Q, slopes_Q = sums[row, head, queries], slopes[row, head, queries]
        order_Q = mine * block + jnp.arange(block, dtype=jnp.int32)

        def add(other: Array, sum_QE: Array) -> Array:
            keys = pl.ds(other * KEYS, KEYS)
            k_SE = k[row, keys, head // group, :]
            scores_QS = dot(q_QE, k_SE, 1, 1) * (width**-0.5 * LOG2E)
            seen_QS = _seen(start_Q, order_Q, other)
            weights_QS = jnp.where(seen_QS, jnp.exp2(scores_QS - sums_Q[:, None]), 0.0)
            grad_QS = weights_QS * (dot(slope_QE, v[row, keys, head // group, :], 1, 1) - slopes_Q[:, None])
            return sum_QE + dot(grad_QS.astype(k_SE.dtype), k_SE)

        nothing = jnp.zeros((block, width), jnp.float32)
        sum_QE = lax.fori_loop(first[row, mine], (mine + 1) * (block // KEYS), add, nothing)
        grad_q[row, queries, head, :] = (sum_QE * width**-0.5).astype(grad_q.dtype)

    grid = (length // block, heads, b)
    how: Any = {"grid": grid, "warps": 8, "interpret": interpret, "name": "attention_grad_queries"}
    arrays = (place.start_BT, place.first_BI, *arrays)
    return _run(kernel, arrays, 3, [output(q.shape, q.dtype, q)], **how)[0]


def _grad_keys(interpret: bool, place: SeenKeys, arrays: tuple[Array, ...]) -> tuple[Array, Array]:
    """Return the gradients of keys and values: sums over the queries' heads and blocks, in this order."""
    q, k, v = arrays[:3]
    b, length, kv_heads, width = k.shape
    group = q.shape[2] // kv_heads

    def kernel(start: Any, end: Any, q: Any, k: Any, v: Any, slope: Any, *others: Any) -> None:
        sums, slopes, grad_k, grad_v = others
        mine, kv_head, row = (pl.program_id(axis) for axis in range(3))
        keys = pl.ds(mine * KEYS, KEYS)
        k_SE, v_SE = k[row, keys, kv_head, :], v[row, keys, kv_head, :]
        order_S = mine * KEYS + jnp.arange(KEYS, dtype=jnp.int32)
        begin, count = mine * KEYS // OF_KEYS, end[row, mine] - mine * KEYS // OF_KEYS

        def add(step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            of_k_SE, of_v_SE = carry
            head, block = kv_head * group + step // count, begin + step % count
            queries = pl.ds(block * OF_KEYS, OF_KEYS)
            q_QE, slope_QE = q[row, queries, head, :], slope[row, queries, head, :]
            order_Q = block * OF_KEYS + jnp.arange(OF_KEYS, dtype=jnp.int32)
            seen_SQ = (order_S[:, None] <= order_Q[None]) & (order_S[:, None] >= start[row, queries][None])
            scores_SQ = dot(k_SE, q_QE, 1, 1) * (width**-0.5 * LOG2E)
            weights_SQ = jnp.where(seen_SQ, jnp.exp2(scores_SQ - sums[row, head, queries][None]), 0.0)
            of_v_SE += dot(weights_SQ.astype(slope_QE.dtype), slope_QE)
            grad_SQ = weights_SQ * (dot(v_SE, slope_QE, 1, 1) - slopes[row, head, queries][None])
            return of_k_SE + dot(grad_SQ.astype(q_QE.dtype), q_QE), of_v_SE

        nothing = jnp.zeros((KEYS, width), jnp.float32)
        of_k_SE, of_v_SE = lax.fori_loop(0, group * count, add, (nothing, nothing))
        grad_k[row, keys, kv_head, :] = (of_k_SE * width**-0.5).astype(grad_k.dtype)
        grad_v[row, keys, kv_head, :] = of_v_SE.astype(grad_v.dtype)

    outputs = [output(x.shape, x.dtype, x) for x in (k, v)]
    grid = (length // KEYS, kv_heads, b)
    warps, arrays = 8 if width > WIDE else 4, (place.start_BT, place.end_BJ, *arrays)
    how: Any = {"grid": grid, "warps": warps, "interpret": interpret, "name": "attention_grad_keys"}
    grad_k, grad_v = _run(kernel, arrays, 4, outputs, **how)
    return grad_k, grad_v


_attend.defvjp(_kept, _backward)


def _seen(start_Q: Array, order_Q: Array, block: Array) -> Array:
    """Return which queries see which keys of a block, [Q, S]."""
    order_S = block * KEYS + jnp.arange(KEYS, dtype=jnp.int32)
    return (order_S[None] <= order_Q[:, None]) & (order_S[None] >= start_Q[:, None])


def _run(
    kernel: Any, arrays: tuple[Array, ...], products: int, outputs: list[jax.ShapeDtypeStruct], **options: Any
) -> Any:
    """Run a kernel whose programs choose by themselves what they read of whole arrays.

    ``products``: how many a query and a key that see each other take part in.
    """
    q = arrays[2]
    pairs = q.size // q.shape[-1] * q.shape[1] // 2  # of rows with one segment
    flops = 2 * products * pairs * q.shape[-1]
    # Readers of a block's keys are neighbours, and find them in the cache.
    moved = sum(x.size * x.dtype.itemsize for x in (*arrays, *outputs))
    return run_triton(kernel, arrays, flops, moved, out_shape=outputs, stages=2, **options)
