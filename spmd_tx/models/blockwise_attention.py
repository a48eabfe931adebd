"""Causal attention within packed segments, for training and prefill, with a cheap backward pass.

Queries are processed in blocks, and a block's scores reach only as far as its last query: nearly half of a
long row's scores are never computed. The backward pass recomputes the probabilities from their log-sum, so no
scores are kept (Dao et al. 2022). The blocks depend on the shape of the rows alone.

Dimension key: B row, T token, S source (key) token, N heads, K key-value heads, G query heads per key-value
head, E head width, Q queries of a block, X = G·Q.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

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


@jax.custom_vjp
def attend_segments(
    q_BTNE: Float[Array, "B T N E"],
    k_BTKE: Float[Array, "B T K E"],
    v_BTKE: Float[Array, "B T K E"],
    segments_BT: Int[Array, "B T"],
) -> Float[Array, "B T N E"]:
    """Attend from every token to the tokens of its segment up to itself, with scores and softmax in fp32."""
    return _forward(q_BTNE, k_BTKE, v_BTKE, segments_BT)[0]


def _forward(q_BTNE: Array, k_BTKE: Array, v_BTKE: Array, segments_BT: Array) -> tuple[Array, Array]:
    """Return the result and the log-sum of each query's scores [B, K, G, T]."""
    q_BKGTE, k_BKSE, v_BKSE = _queries_by_head(q_BTNE, k_BTKE), _by_head(k_BTKE), _by_head(v_BTKE)
    parts = []
    for start, end in blocks(q_BTNE.shape[1]):
        keys = k_BKSE[:, :, :end], v_BKSE[:, :, :end], segments_BT[:, :end]
        queries = q_BKGTE[:, :, :, start:end], segments_BT[:, None, None, start:end]
        parts.append(_over_queries(partial(_attend_block, *keys), start, queries))
    y_BKGTE, sums_BKGT = (jnp.concatenate(part, axis=3) for part in zip(*parts, strict=True))
    return _by_token(y_BKGTE), sums_BKGT


def _attend_block(
    k_BKSE: Array, v_BKSE: Array, segments_BS: Array, first: Array, queries: tuple[Array, Array]
) -> tuple[Array, Array]:
    q_BKGQE, segments_B11Q = queries
    scores = _scores(k_BKSE, segments_BS, first, q_BKGQE, segments_B11Q)
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - peak)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    y_BKGQE = _times(weights.astype(v_BKSE.dtype), v_BKSE).astype(jnp.float32) / total
    return y_BKGQE.astype(v_BKSE.dtype), (peak + jnp.log(total))[..., 0]


def _scores(k_BKSE: Array, segments_BS: Array, first: Array, q_BKGQE: Array, segments_B11Q: Array) -> Array:
    """Return [B, K, G, Q, S] in fp32. The first query is at position ``first`` of its row."""
    b, heads, group, count, width = q_BKGQE.shape
    flat = q_BKGQE.reshape(b, heads, group * count, width)
    scores = jnp.einsum("BKXE,BKSE->BKXS", flat, k_BKSE, preferred_element_type=jnp.float32)
    scores = scores.reshape(b, heads, group, count, -1) * width**-0.5
    query_Q1 = first + lax.broadcasted_iota(jnp.int32, (count, 1), 0)
    is_causal_QS = query_Q1 >= lax.broadcasted_iota(jnp.int32, (1, k_BKSE.shape[2]), 1)
    is_own_B11QS = segments_B11Q[..., None] == segments_BS[:, None, None, None]
    return jnp.where(is_causal_QS[None, None, None] & is_own_B11QS, scores, MASKED)


def _times(weights_BKGQS: Array, x_BKSE: Array) -> Array:
    """[B, K, G, Q, S] times [B, K, S, E]"""
    b, heads, group, count, keys = weights_BKGQS.shape
    flat = weights_BKGQS.reshape(b, heads, group * count, keys)
    return jnp.einsum("BKXS,BKSE->BKXE", flat, x_BKSE).reshape(b, heads, group, count, -1)


def _kept(q: Array, k: Array, v: Array, segments: Array) -> tuple[Array, tuple[Array, ...]]:
    # Named here, not by the caller: the backward pass reads these very arrays (backbone.REMAT_LEVELS).
    y, sums = (checkpoint_name(x, "attended") for x in _forward(q, k, v, segments))
    return y, (q, k, v, segments, y, sums)


def _backward(kept: tuple[Array, ...], grad_y_BTNE: Array) -> tuple[Array, Array, Array, None]:
    q_BTNE, k_BTKE, v_BTKE, segments_BT, y_BTNE, sums_BKGT = kept
    q_BKGTE, k_BKSE, v_BKSE = _queries_by_head(q_BTNE, k_BTKE), _by_head(k_BTKE), _by_head(v_BTKE)
    grad_y_BKGTE = _queries_by_head(grad_y_BTNE, k_BTKE)
    products = grad_y_BTNE.astype(jnp.float32) * y_BTNE.astype(jnp.float32)
    slopes_BKGT = jnp.sum(_queries_by_head(products, k_BTKE), axis=-1)
    grad_q, grad_k, grad_v = [], jnp.zeros_like(k_BKSE, jnp.float32), jnp.zeros_like(v_BKSE, jnp.float32)
    for start, end in blocks(q_BTNE.shape[1]):
        keys = k_BKSE[:, :, :end], v_BKSE[:, :, :end], segments_BT[:, :end]
        own = (x[:, :, :, start:end] for x in (q_BKGTE, grad_y_BKGTE, sums_BKGT, slopes_BKGT))
        queries = (*own, segments_BT[:, None, None, start:end])
        sums = grad_k[:, :, :end], grad_v[:, :, :end]
        part, sums = _back_over_queries(partial(_back_block, *keys), start, queries, sums)
        grad_q.append(part)
        grad_k, grad_v = (x.at[:, :, :end].set(new) for x, new in zip((grad_k, grad_v), sums, strict=True))
    grad_q_BTNE = _by_token(jnp.concatenate(grad_q, axis=3))
    grad_k, grad_v = (x.swapaxes(1, 2).astype(k_BTKE.dtype) for x in (grad_k, grad_v))
    return grad_q_BTNE, grad_k, grad_v, None


def _back_block(
    k_BKSE: Array, v_BKSE: Array, segments_BS: Array, first: Array, queries: tuple[Array, ...]
) -> tuple[Array, tuple[Array, Array]]:
    """Return the gradient of a block's queries, and what to add to those of keys and values."""
    q_BKGQE, grad_y_BKGQE, sums_BKGQ, slopes_BKGQ, segments_B11Q = queries
    b, heads, group, count, width = q_BKGQE.shape
    scores = _scores(k_BKSE, segments_BS, first, q_BKGQE, segments_B11Q)
    weights = jnp.exp(scores - sums_BKGQ[..., None])
    flat_q, flat_grad_y = (x.reshape(b, heads, group * count, width) for x in (q_BKGQE, grad_y_BKGQE))
    rising = jnp.einsum("BKXE,BKSE->BKXS", flat_grad_y, v_BKSE, preferred_element_type=jnp.float32)
    grad_scores = weights * (rising.reshape(weights.shape) - slopes_BKGQ[..., None]) * width**-0.5
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


attend_segments.defvjp(_kept, _backward)
