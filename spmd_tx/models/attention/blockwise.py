"""Causal attention within packed segments, for training and prefill, with a cheap backward pass.

Queries are processed in blocks, and a block's scores reach only as far as its last query: nearly half of a
long row's scores are never computed. The backward pass recomputes the probabilities from their log-sum, so no
scores are kept (Dao et al. 2022). The blocks depend on the shape of the rows alone. With a window, a block's
scores begin at the first token that its first query sees.

Dimension key: B row, T token, S source (key) token, N heads, K key-value heads, G query heads per key-value
head, E head width, Q queries of a block, X = G·Q.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

MOST_BLOCKS = 4  # each adds a second or two of compilation
SHORTEST_BLOCK = 128  # queries; smaller products are inefficient
GOOD_BLOCK = 256  # queries; a row has more than two blocks only if they are at least this long
QUERIES_AT_ONCE = 512  # queries whose scores are held at once

MASKED = -1e30  # not -inf: rows of pure padding must stay finite


def blocks(length: int) -> list[tuple[int, int]]:
    """Return (first query, last query + 1) of each block."""
    size = max(SHORTEST_BLOCK, min(GOOD_BLOCK, -(-length // 2)), -(-length // MOST_BLOCKS))
    return [(start, min(start + size, length)) for start in range(0, length, size)]


@dataclass(frozen=True)
class _Sight:
    """Says which tokens a query sees, and how its scores are scaled."""

    scale: float | None = None  # None: by the root of the width of a head
    window: int = 0  # tokens, the query's own among them; 0: all before it

    def scaled(self, scores: Array, width: int) -> Array:
        return scores * (width**-0.5 if self.scale is None else self.scale)

    def first_key(self, start: int) -> int:
        """Return the first token that queries from ``start`` on may see."""
        return max(0, start - self.window + 1) if self.window else 0


def attend_segments(
    q_BTNE: Float[Array, "B T N E"],
    k_BTKE: Float[Array, "B T K E"],
    v_BTKE: Float[Array, "B T K V"],
    segments_BT: Int[Array, "B T"],
    *,
    sinks_N: Float[Array, " N"] | None = None,
    scale: float | None = None,
    window: int = 0,
) -> Float[Array, "B T N V"]:
    """Attend from every token to the tokens of its segment up to itself, with scores and softmax in fp32.

    Scores are multiplied by ``scale``, or divided by the root of a head's width. With a ``window`` a token
    sees so many tokens, itself among them; 0: all. A sink is a score that takes part in the softmax of its
    head and has no value (Xiao et al. 2024); sinks are frozen and get no gradient.
    """
    return cast(Array, _attend(_Sight(scale, window), q_BTNE, k_BTKE, v_BTKE, segments_BT, sinks_N))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    sight: _Sight, q_BTNE: Array, k_BTKE: Array, v_BTKE: Array, segments_BT: Array, sinks_N: Array | None
) -> Array:
    return _forward(sight, q_BTNE, k_BTKE, v_BTKE, segments_BT, sinks_N)[0]


def _forward(
    sight: _Sight, q_BTNE: Array, k_BTKE: Array, v_BTKE: Array, segments_BT: Array, sinks_N: Array | None
) -> tuple[Array, Array]:
    """Return the result and the log-sum of each query's scores [B, K, G, T]."""
    q_BKGTE, k_BKSE, v_BKSE = _queries_by_head(q_BTNE, k_BTKE), _by_head(k_BTKE), _by_head(v_BTKE)
    sinks_KG1 = None if sinks_N is None else sinks_N.astype(jnp.float32).reshape(*q_BKGTE.shape[1:3], 1)
    parts = []
    for start, end in blocks(q_BTNE.shape[1]):
        low = sight.first_key(start)
        keys = k_BKSE[:, :, low:end], v_BKSE[:, :, low:end], segments_BT[:, low:end]
        queries = q_BKGTE[:, :, :, start:end], segments_BT[:, None, None, start:end]
        attend = partial(_attend_block, sight, sinks_KG1, low, *keys)
        parts.append(_over_queries(attend, start, queries))
    y_BKGTE, sums_BKGT = (jnp.concatenate(part, axis=3) for part in zip(*parts, strict=True))
    return _by_token(y_BKGTE), sums_BKGT


def _attend_block(
    sight: _Sight,
    sinks_KG1: Array | None,
    low: int,
    k_BKSE: Array,
    v_BKSE: Array,
    segments_BS: Array,
    first: Array,
    queries: tuple[Array, Array],
) -> tuple[Array, Array]:
    q_BKGQE, segments_B11Q = queries
    scores = _scores(sight, low, k_BKSE, segments_BS, first, q_BKGQE, segments_B11Q)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    if sinks_KG1 is not None:
        peak = jnp.maximum(peak, sinks_KG1[None, ..., None])
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks_KG1 is not None:
        total = total + jnp.exp(sinks_KG1[None, ..., None] - peak)
    y_BKGQE = _times(weights.astype(v_BKSE.dtype), v_BKSE).astype(jnp.float32) / total
    return y_BKGQE.astype(v_BKSE.dtype), (peak + jnp.log(total))[..., 0]


def _scores(
    sight: _Sight,
    low: int,
    k_BKSE: Array,
    segments_BS: Array,
    first: Array,
    q_BKGQE: Array,
    segments_B11Q: Array,
) -> Array:
    """Return [B, K, G, Q, S] in fp32.

    The first query is at position ``first`` of its row, the first key at ``low``.
    """
    b, heads, group, count, width = q_BKGQE.shape
    flat = q_BKGQE.reshape(b, heads, group * count, width)
    scores = jnp.einsum("BKXE,BKSE->BKXS", flat, k_BKSE, preferred_element_type=jnp.float32)
    scores = sight.scaled(scores.reshape(b, heads, group, count, -1), width)
    query_Q1 = first + lax.broadcasted_iota(jnp.int32, (count, 1), 0)
    key_1S = lax.broadcasted_iota(jnp.int32, (1, k_BKSE.shape[2]), 1)
    if sight.window:
        key_1S = key_1S + low
    is_seen_QS = query_Q1 >= key_1S
    if sight.window:
        is_seen_QS &= query_Q1 < key_1S + sight.window
    is_own_B11QS = segments_B11Q[..., None] == segments_BS[:, None, None, None]
    return jnp.where(is_seen_QS[None, None, None] & is_own_B11QS, scores, MASKED)


def _times(weights_BKGQS: Array, x_BKSE: Array) -> Array:
    """[B, K, G, Q, S] times [B, K, S, E]"""
    b, heads, group, count, keys = weights_BKGQS.shape
    flat = weights_BKGQS.reshape(b, heads, group * count, keys)
    return jnp.einsum("BKXS,BKSE->BKXE", flat, x_BKSE).reshape(b, heads, group, count, -1)


def _kept(
    sight: _Sight, q: Array, k: Array, v: Array, segments: Array, sinks: Array | None
) -> tuple[Array, tuple[Array, ...]]:
    # Named here, not by the caller: the backward pass reads these very arrays (remat.REMAT_LEVELS).
    y, sums = (checkpoint_name(x, "attended") for x in _forward(sight, q, k, v, segments, sinks))
    return y, (q, k, v, segments, y, sums)


def _backward(
    sight: _Sight, kept: tuple[Array, ...], grad_y_BTNE: Array
) -> tuple[Array, Array, Array, None, None]:
    q_BTNE, k_BTKE, v_BTKE, segments_BT, y_BTNE, sums_BKGT = kept
    q_BKGTE, k_BKSE, v_BKSE = _queries_by_head(q_BTNE, k_BTKE), _by_head(k_BTKE), _by_head(v_BTKE)
    grad_y_BKGTE = _queries_by_head(grad_y_BTNE, k_BTKE)
    products = grad_y_BTNE.astype(jnp.float32) * y_BTNE.astype(jnp.float32)
    slopes_BKGT = jnp.sum(_queries_by_head(products, k_BTKE), axis=-1)
    grad_q, grad_k, grad_v = [], jnp.zeros_like(k_BKSE, jnp.float32), jnp.zeros_like(v_BKSE, jnp.float32)
    for start, end in blocks(q_BTNE.shape[1]):
        low = sight.first_key(start)
        keys = k_BKSE[:, :, low:end], v_BKSE[:, :, low:end], segments_BT[:, low:end]
        own = (x[:, :, :, start:end] for x in (q_BKGTE, grad_y_BKGTE, sums_BKGT, slopes_BKGT))
        queries = (*own, segments_BT[:, None, None, start:end])
        sums = grad_k[:, :, low:end], grad_v[:, :, low:end]
        back = partial(_back_block, sight, low, *keys)
        part, sums = _back_over_queries(back, start, queries, sums)
        grad_q.append(part)
        grad_k, grad_v = (x.at[:, :, low:end].set(new) for x, new in zip((grad_k, grad_v), sums, strict=True))
    grad_q_BTNE = _by_token(jnp.concatenate(grad_q, axis=3))
    grad_k, grad_v = (x.swapaxes(1, 2).astype(k_BTKE.dtype) for x in (grad_k, grad_v))
    return grad_q_BTNE, grad_k, grad_v, None, None


def _back_block(
    sight: _Sight,
    low: int,
    k_BKSE: Array,
    v_BKSE: Array,
    segments_BS: Array,
    first: Array,
    queries: tuple[Array, ...],
) -> tuple[Array, tuple[Array, Array]]:
    """Return the gradient of a block's queries, and what to add to those of keys and values."""
    q_BKGQE, grad_y_BKGQE, sums_BKGQ, slopes_BKGQ, segments_B11Q = queries
    b, heads, group, count, width = q_BKGQE.shape
    scores = _scores(sight, low, k_BKSE, segments_BS, first, q_BKGQE, segments_B11Q)
    weights = jnp.exp(scores - sums_BKGQ[..., None])
    flat_q, flat_grad_y = (x.reshape(b, heads, group * count, -1) for x in (q_BKGQE, grad_y_BKGQE))
    rising = jnp.einsum("BKXE,BKSE->BKXS", flat_grad_y, v_BKSE, preferred_element_type=jnp.float32)
    grad_scores = sight.scaled(weights * (rising.reshape(weights.shape) - slopes_BKGQ[..., None]), width)
    weights, grad_scores = weights.astype(q_BKGQE.dtype), grad_scores.astype(q_BKGQE.dtype)
    add = partial(jnp.einsum, "BKXS,BKXE->BKSE", preferred_element_type=jnp.float32)
    flat = b, heads, group * count, -1
    added = add(grad_scores.reshape(flat), flat_q), add(weights.reshape(flat), flat_grad_y)
    return _times(grad_scores, k_BKSE), added


def _over_queries(attend: Callable[..., tuple[Array, Array]], start: int, queries: tuple[Array, ...]) -> Any:
    """Process a block at once, or a long one in parts of QUERIES_AT_ONCE queries."""
    count = queries[0].shape[3]
    if count <= QUERIES_AT_ONCE or count % QUERIES_AT_ONCE:
        return attend(jnp.int32(start), queries)
    parts = _parts(start, queries)
    return jax.tree.map(_joined, lax.map(lambda part: attend(*part), parts))


def _back_over_queries(
    back: Callable[..., tuple[Array, tuple[Array, Array]]],
    start: int,
    queries: tuple[Array, ...],
    sums: tuple[Array, Array],
) -> tuple[Array, tuple[Array, Array]]:
    """Do the same in the backward pass, adding the gradients of keys and values to ``sums`` in order."""

    def step(sums: tuple[Array, Array], part: tuple[Array, tuple[Array, ...]]) -> Any:
        grad_q, added = back(*part)
        return jax.tree.map(jnp.add, sums, added), grad_q

    count = queries[0].shape[3]
    if count <= QUERIES_AT_ONCE or count % QUERIES_AT_ONCE:
        sums, grad_q = step(sums, (jnp.int32(start), queries))
        return grad_q, sums
    sums, grad_q = lax.scan(step, sums, _parts(start, queries))
    return _joined(grad_q), sums


def _parts(start: int, queries: tuple[Array, ...]) -> tuple[Array, tuple[Array, ...]]:
    """Return each part's first position, and the arrays [..., Q, ...] cut along the fourth dimension."""
    count = queries[0].shape[3] // QUERIES_AT_ONCE
    first = start + QUERIES_AT_ONCE * jnp.arange(count, dtype=jnp.int32)

    def cut(x: Array) -> Array:
        parts = x.reshape(*x.shape[:3], count, QUERIES_AT_ONCE, *x.shape[4:])
        return jnp.moveaxis(parts, 3, 0)

    return first, tuple(cut(x) for x in queries)


def _joined(parts: Array) -> Array:
    """[parts, ..., Q, ...] -> [..., parts · Q, ...]"""
    x = jnp.moveaxis(parts, 0, 3)
    return x.reshape(*x.shape[:3], -1, *x.shape[5:])


def _by_head(x_BTKE: Array) -> Array:
    return x_BTKE.swapaxes(1, 2)


def _queries_by_head(x_BTNE: Array, like_BTKE: Array) -> Array:
    """[B, T, N, E] -> [B, K, G, T, E]"""
    b, t, _, e = x_BTNE.shape
    return x_BTNE.reshape(b, t, like_BTKE.shape[2], -1, e).transpose(0, 2, 3, 1, 4)


def _by_token(x_BKGTE: Array) -> Array:
    """[B, K, G, T, E] -> [B, T, N, E]"""
    b, _, _, t, e = x_BKGTE.shape
    return x_BKGTE.transpose(0, 3, 1, 2, 4).reshape(b, t, -1, e)


_attend.defvjp(_kept, _backward)
