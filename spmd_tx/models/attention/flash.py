"""Flash attention for TPUs: causal attention within packed segments, as Pallas kernels (Dao et al. 2022).

Scores exist for one block of queries and one block of keys at a time. Blocks that share no segment with the
queries, or come after them, are neither read nor computed. Which blocks those are follows from the row alone.

Kernels hold scores as [keys, queries], so that the numbers of queries are vectors [1, queries].

Dimension key: B row, T token, N heads, K key-value heads, E head width, H heads x head width, S key of a
block, Q query of a block, I block of a row.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from spmd_tx.hlo.hints import COUNTS_ARRAYS
from spmd_tx.models.pallas import dot, output
from spmd_tx.sharding.tree_node import TreeNode

LONGEST_BLOCK = 512  # tokens
SHORTEST_ROW = 128  # tokens; for shorter rows, XLA's programs are faster
LANES = 128  # numbers in a row of a vector register
MASKED = -1e30  # not -inf: a query may have no key in the first of its blocks


class SeenBlocks(TreeNode):
    """Holds what the segments say, once for all layers."""

    start: Any  # int32 [B, 1, T]: where the segment of a token begins
    first: Any  # int32 [B, I]: the first block of keys that a block of queries attends to
    last: Any  # int32 [B, I]: the last block of queries that attends to a block of keys


def block_length(length: int) -> int | None:
    """Return the tokens of a block in rows of this length; None if there are no kernels for it."""
    if length < SHORTEST_ROW:
        return None
    if length <= LONGEST_BLOCK:
        return length
    return next((size for size in range(LONGEST_BLOCK, 0, -LANES) if length % size == 0), None)


def place_of(segments_BT: Int[Array, "B T"], block: int, window: int = 0) -> SeenBlocks:
    """Find what each token sees, and which blocks share a segment."""
    start_BT = starts(segments_BT, window)
    first_BI = start_BT[:, ::block] // block
    number_I = jnp.arange(first_BI.shape[1], dtype=jnp.int32)
    last_BI = jnp.sum(first_BI[:, None] <= number_I[None, :, None], axis=2, dtype=jnp.int32) - 1
    return SeenBlocks(start_BT[:, None], first_BI, last_BI)


def starts(segments_BT: Int[Array, "B T"], window: int = 0) -> Int[Array, "B T"]:
    """Return the first token that each token sees. A segment ends where the number changes.

    With a window, a token's segment is taken to begin no earlier than what the token sees.
    """
    begins_BT = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    position_BT = lax.broadcasted_iota(jnp.int32, segments_BT.shape, 1)
    start_BT = lax.cummax(jnp.where(begins_BT, position_BT, 0), axis=1)
    if window:
        start_BT = jnp.maximum(start_BT, position_BT - (window - 1))
    return start_BT


def attend_blocks(
    q_BTNE: Float[Array, "B T N E"],
    k_BTKE: Float[Array, "B T K E"],
    v_BTKE: Float[Array, "B T K E"],
    place: SeenBlocks,
    sinks_N: Float[Array, " N"] | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "B T N E"]:
    """Attend from every token to the tokens of its segment up to itself, with scores and softmax in fp32.

    Sinks are those of blockwise_attention.attend_segments. ``interpret`` is that of Kernels.
    """
    width, spare = q_BTNE.shape[-1], -q_BTNE.shape[-1] % LANES

    def flat(x: Array) -> Array:  # heads beside each other; zeros fill them up and change no score
        x = jnp.pad(x, (*[(0, 0)] * 3, (0, spare))) if spare else x
        return x.reshape(*x.shape[:2], -1)

    arrays = flat(q_BTNE), flat(k_BTKE), flat(v_BTKE)
    how = _How(k_BTKE.shape[2], width**-0.5, interpret)
    y_BTH: Any = _attend(how, *arrays, place, sinks_N)
    return y_BTH.reshape(*q_BTNE.shape[:3], -1)[..., :width]


class _How(NamedTuple):
    kv_heads: int
    scale: float  # by which scores are multiplied
    interpret: bool


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    how: _How, q_BTH: Array, k_BTH: Array, v_BTH: Array, place: SeenBlocks, sinks_N: Array | None
) -> Array:
    return _forward(how, q_BTH, k_BTH, v_BTH, place, sinks_N)[0]


def _kept(
    how: _How, q: Array, k: Array, v: Array, place: SeenBlocks, sinks_N: Array | None
) -> tuple[Array, tuple[Any, ...]]:
    # Named here, not by the caller: the backward pass reads these very arrays (remat.REMAT_LEVELS).
    y, sums = (checkpoint_name(x, "attended") for x in _forward(how, q, k, v, place, sinks_N))
    return y, (q, k, v, place, y, sums)


def _forward(
    how: _How, q_BTH: Array, k_BTH: Array, v_BTH: Array, place: SeenBlocks, sinks_N: Array | None
) -> tuple[Array, Array]:
    """Return the result, and the log-sum of each query's scores [B, N, 1, T]."""
    grid = _Grid(how, q_BTH, k_BTH, place)
    sinks = []
    if sinks_N is not None:  # as many as a block has queries, which begin with them
        sinks = [jnp.broadcast_to(sinks_N.astype(jnp.float32)[:, None, None], (grid.heads, 1, grid.block))]

    def kernel(first: Any, start: Any, q: Any, k: Any, v: Any, *others: Any) -> None:
        *of_head, y, sums, peak, total, result = others
        row, mine, other = pl.program_id(0), pl.program_id(2), pl.program_id(3)

        @pl.when(other == 0)
        def _begin() -> None:
            peak[...] = of_head[0][0] if of_head else jnp.full(peak.shape, MASKED, jnp.float32)
            total[...] = jnp.full(total.shape, len(of_head), jnp.float32)
            result[...] = jnp.zeros(result.shape, jnp.float32)

        @pl.when((other >= first[row, mine]) & (other <= mine))
        def _add() -> None:
            scores_SQ = _scores(how.scale, q[0], k[0], start[0], mine, other)
            peak_1Q = jnp.maximum(peak[...], jnp.max(scores_SQ, axis=0, keepdims=True))
            weights_SQ, shrink_1Q = jnp.exp(scores_SQ - peak_1Q), jnp.exp(peak[...] - peak_1Q)
            total[...] = total[...] * shrink_1Q + jnp.sum(weights_SQ, axis=0, keepdims=True)
            result[...] = result[...] * shrink_1Q + dot(v[0], weights_SQ.astype(v.dtype), 0, 0)
            peak[...] = peak_1Q

        @pl.when(other == mine)
        def _end() -> None:
            y[0] = (result[...] / total[...]).T.astype(y.dtype)
            sums[0, 0] = peak[...] + jnp.log(total[...])

    statistics = (*grid.rows, grid.heads, 1, grid.length)
    outputs = [output(q_BTH.shape, q_BTH.dtype, q_BTH), output(statistics, jnp.float32, q_BTH)]
    specs = [grid.start, grid.queries, grid.keys, grid.keys, *(grid.of_head for _ in sinks)]
    held = [(1, grid.block), (1, grid.block), (grid.width, grid.block)]
    call = grid.call("attention_forward", kernel, specs, [grid.queries, grid.numbers], outputs, held, 2)
    y_BTH, sums = call(place.first, place.start, q_BTH, k_BTH, v_BTH, *sinks)
    return y_BTH, sums


def _backward(how: _How, kept: tuple[Any, ...], slope_BTH: Array) -> tuple[Any, ...]:
    q_BTH, k_BTH, v_BTH, place, y_BTH, sums = kept
    grid = _Grid(how, q_BTH, k_BTH, place)
    products = slope_BTH.astype(jnp.float32) * y_BTH.astype(jnp.float32)
    slopes = jnp.sum(products.reshape(*grid.rows, grid.length, grid.heads, -1), axis=-1)
    slopes = slopes.swapaxes(1, 2)[:, :, None]  # [B, N, 1, T]
    arrays = place.start, q_BTH, k_BTH, v_BTH, slope_BTH.astype(q_BTH.dtype), sums, slopes
    grad_k, grad_v = _grad_keys(how, grid, place, arrays)
    return _grad_queries(how, grid, place, arrays), grad_k, grad_v, None, None


def _grad_queries(how: _How, grid: "_Grid", place: SeenBlocks, arrays: tuple[Array, ...]) -> Array:
    """Return the gradient of the queries."""

    def kernel(first: Any, start: Any, q: Any, k: Any, v: Any, *others: Any) -> None:
        slope, sums, slopes, grad_q, result = others
        row, mine, other = pl.program_id(0), pl.program_id(2), pl.program_id(3)

        @pl.when(other == 0)
        def _begin() -> None:
            result[...] = jnp.zeros(result.shape, jnp.float32)

        @pl.when((other >= first[row, mine]) & (other <= mine))
        def _add() -> None:
            scores_SQ = _scores(how.scale, q[0], k[0], start[0], mine, other)
            _, grad_SQ = _grad_scores(how.scale, scores_SQ, v[0], slope[0], sums[0, 0], slopes[0, 0])
            result[...] += dot(k[0], grad_SQ.astype(k.dtype), 0, 0)

        @pl.when(other == mine)
        def _end() -> None:
            grad_q[0] = result[...].T.astype(grad_q.dtype)

    specs = [grid.start, grid.queries, grid.keys, grid.keys, grid.queries, grid.numbers, grid.numbers]
    outputs = [output(arrays[1].shape, arrays[1].dtype, arrays[1])]
    held = [(grid.width, grid.block)]
    call = grid.call("attention_grad_queries", kernel, specs, [grid.queries], outputs, held, 3)
    return call(place.first, *arrays)[0]


def _grad_keys(how: _How, grid: "_Grid", place: SeenBlocks, arrays: tuple[Array, ...]) -> tuple[Array, Array]:
    """Return the gradients of keys and values: sums over the queries' heads and blocks, in this order."""

    def kernel(last: Any, start: Any, q: Any, k: Any, v: Any, *others: Any) -> None:
        slope, sums, slopes, grad_k, grad_v, of_k, of_v = others
        row, mine, head, other = (pl.program_id(axis) for axis in (0, 2, 3, 4))

        @pl.when((head == 0) & (other == 0))
        def _begin() -> None:
            of_k[...] = jnp.zeros(of_k.shape, jnp.float32)
            of_v[...] = jnp.zeros(of_v.shape, jnp.float32)

        @pl.when((other >= mine) & (other <= last[row, mine]))
        def _add() -> None:
            scores_SQ = _scores(how.scale, q[0], k[0], start[0], other, mine)
            weights_SQ, grad_SQ = _grad_scores(how.scale, scores_SQ, v[0], slope[0], sums[0, 0], slopes[0, 0])
            of_k[...] += dot(grad_SQ.astype(q.dtype), q[0])
            of_v[...] += dot(weights_SQ.astype(q.dtype), slope[0])

        @pl.when((head == grid.group - 1) & (other == grid.blocks - 1))
        def _end() -> None:
            grad_k[0], grad_v[0] = of_k[...].astype(grad_k.dtype), of_v[...].astype(grad_v.dtype)

    keys, queries, numbers, start = grid.of_keys()
    specs = [start, queries, keys, keys, queries, numbers, numbers]
    outputs = [output(x.shape, x.dtype, x) for x in arrays[2:4]]
    held = [(grid.block, grid.width)] * 2
    call = grid.call("attention_grad_keys", kernel, specs, [keys, keys], outputs, held, 4, by_keys=True)
    grad_k, grad_v = call(place.last, *arrays)
    return grad_k, grad_v


_attend.defvjp(_kept, _backward)


class _Grid:
    """Holds the sizes of a call, and which block of each array a program reads.

    Programs run for each row, head, block of queries and block of keys; where keys own the results, for each
    row, key-value head, block of keys, head of its group and block of queries. Blocks that are not needed are
    replaced by needed ones, which are there already or are needed next, so that nothing is read for them.
    """

    def __init__(self, how: _How, q_BTH: Array, k_BTH: Array, place: SeenBlocks) -> None:
        self.rows, self.length = q_BTH.shape[:1], q_BTH.shape[1]
        self.blocks, self.interpret = place.first.shape[1], how.interpret
        self.block, self.kv_heads = self.length // self.blocks, how.kv_heads
        self.width = k_BTH.shape[2] // self.kv_heads
        self.heads = q_BTH.shape[2] // self.width
        self.group = self.heads // self.kv_heads
        block, tokens = self.block, (1, self.block, self.width)

        def key_block(row: Any, head: Any, mine: Any, other: Any, first: Any) -> tuple[Any, ...]:
            return row, jnp.clip(other, first[row, mine], mine), lax.div(head, self.group)

        self.queries = pl.BlockSpec(tokens, lambda row, head, mine, other, first: (row, mine, head))
        self.keys = pl.BlockSpec(tokens, key_block)
        self.numbers = pl.BlockSpec(
            (1, 1, 1, block), lambda row, head, mine, other, first: (row, head, 0, mine)
        )
        self.of_head = pl.BlockSpec((1, 1, block), lambda row, head, mine, other, first: (head, 0, 0))
        self.start = pl.BlockSpec((1, 1, block), lambda row, head, mine, other, first: (row, 0, mine))

    def of_keys(self) -> tuple[Any, Any, Any, Any]:
        """Return the blocks of keys, queries, queries' numbers and starts where keys own the results."""
        tokens, group = (1, self.block, self.width), self.group

        def wanted(row: Any, mine: Any, other: Any, last: Any) -> Any:
            return jnp.clip(other, mine, last[row, mine])

        return (
            pl.BlockSpec(tokens, lambda row, head, mine, of_group, other, last: (row, mine, head)),
            pl.BlockSpec(
                tokens,
                lambda row, head, mine, of_group, other, last: (
                    row,
                    wanted(row, mine, other, last),
                    head * group + of_group,
                ),
            ),
            pl.BlockSpec(
                (1, 1, 1, self.block),
                lambda row, head, mine, of_group, other, last: (
                    row,
                    head * group + of_group,
                    0,
                    wanted(row, mine, other, last),
                ),
            ),
            pl.BlockSpec(
                (1, 1, self.block),
                lambda row, head, mine, of_group, other, last: (row, 0, wanted(row, mine, other, last)),
            ),
        )

    def call(
        self,
        name: str,
        kernel: Any,
        in_specs: list[Any],
        out_specs: list[Any],
        outputs: list[jax.ShapeDtypeStruct],
        held: list[tuple[int, int]],
        products: int,
        *,
        by_keys: bool = False,
    ) -> Any:
        """Return the call of a kernel that holds such arrays in fp32 between its programs.

        Its estimate counts each array once, although keys are read again for each head and block of queries.
        """
        from jax.experimental.pallas import tpu as pltpu

        kinds: Any = "parallel", "arbitrary"
        outer = (*self.rows, self.kv_heads, self.blocks) if by_keys else (*self.rows, self.heads, self.blocks)
        inner = (self.group, self.blocks) if by_keys else (self.blocks,)
        pairs = self.rows[0] * self.heads * self.length * (self.length + self.block) // 2
        grid_spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(*outer, *inner),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in held],
        )
        dimensions = (*kinds[:1] * len(outer), *kinds[1:] * len(inner))

        def run(*arrays: Array) -> Any:
            cost = pl.CostEstimate(
                flops=2 * products * pairs * self.width,
                transcendentals=pairs,
                bytes_accessed=sum(each.size * each.dtype.itemsize for each in (*arrays, *outputs)),
            )
            call = pl.pallas_call(
                kernel,
                out_shape=outputs,
                grid_spec=grid_spec,
                compiler_params=pltpu.CompilerParams(dimension_semantics=dimensions),
                cost_estimate=cost,
                interpret=self.interpret,
                name=name,
            )
            with jax.named_scope(COUNTS_ARRAYS):
                return call(*arrays)

        return run


def _scores(scale: float, q_QE: Array, k_SE: Array, start_1Q: Array, queries: Any, keys: Any) -> Array:
    """Return the scores [S, Q] of blocks number ``queries`` and ``keys`` of a row."""
    scores_SQ = dot(k_SE, q_QE, 1, 1) * scale
    key_SQ = keys * k_SE.shape[0] + lax.broadcasted_iota(jnp.int32, scores_SQ.shape, 0)
    query_SQ = queries * q_QE.shape[0] + lax.broadcasted_iota(jnp.int32, scores_SQ.shape, 1)
    return jnp.where((key_SQ <= query_SQ) & (key_SQ >= start_1Q), scores_SQ, MASKED)


def _grad_scores(
    scale: float, scores_SQ: Array, v_SE: Array, slope_QE: Array, sums_1Q: Array, slopes_1Q: Array
) -> tuple[Array, Array]:
    """Return the softmax's weights, and the gradient of the products of queries and keys."""
    weights_SQ = jnp.exp(scores_SQ - sums_1Q)
    rising_SQ = dot(v_SE, slope_QE, 1, 1)
    return weights_SQ, weights_SQ * (rising_SQ - slopes_1Q) * scale
