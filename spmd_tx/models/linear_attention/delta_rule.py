"""The gated delta rule (Yang et al. 2025): chunk by chunk over packed rows, and token by token in a decode.

For each head of values, with a matrix S [keys, values] that begins at zero with every segment:
    S <- e^g S;  S <- S + k (strength (v - S^T k))^T;  o = S^T q
All of it is computed in fp32: errors of S last for the whole sequence.

Within a chunk of CHUNK tokens the recurrence is a triangular system of equations, so a chunk takes a few
matrix products. Chunks begin at multiples of CHUNK tokens of a row. A row read in pieces of such lengths
gives the same bits as read at once, and nothing depends on other rows.

Dimension key: B row, T token, K head of keys, G heads of values per head of keys, E width of a key, V width
of a value, N chunk, C token of a chunk (I and J in formulas), H head of values (K times G).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from spmd_tx.sharding.collectives import varying

CHUNK = 64  # tokens
SPAN = 16  # chunks whose products within themselves are held at once
LEAF = 16  # rows of the blocks that are inverted as whole matrices
EPS = 1e-6  # under the root of a key's length

# Rounded to bfloat16 or TF32, as matrix units do unless told otherwise, errors would add up in S.
product = partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def decay_and_strength(
    a_BTH: Float[Array, "B T H"],
    b_BTH: Float[Array, "B T H"],
    a_log_H: Float[Array, " H"],
    dt_bias_H: Float[Array, " H"],
) -> tuple[Float[Array, "B T H"], Float[Array, "B T H"]]:
    """Return the log of each token's decay, at most 0, and its write's strength, from 0 to 1; in fp32."""
    a_log_H, dt_bias_H = a_log_H.astype(jnp.float32), dt_bias_H.astype(jnp.float32)
    step_BTH = jax.nn.softplus(a_BTH.astype(jnp.float32) + dt_bias_H[None, None])
    return -jnp.exp(a_log_H)[None, None] * step_BTH, jax.nn.sigmoid(b_BTH.astype(jnp.float32))


def unit(x: Float[Array, "... E"]) -> Float[Array, "... E"]:
    """Divide by the length over the last dimension, in fp32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + EPS)


def of_heads(
    q_BKE: Float[Array, "B K E"], k_BKE: Float[Array, "B K E"], heads: int
) -> tuple[Float[Array, "B H E"], Float[Array, "B H E"]]:
    """Return queries and keys as the rule takes them, for each head of values: from raw ones, in fp32."""
    group = heads // k_BKE.shape[1]
    q_BHE = jnp.repeat(unit(q_BKE) * q_BKE.shape[-1] ** -0.5, group, axis=1)
    return q_BHE, jnp.repeat(unit(k_BKE), group, axis=1)


def read_token(
    q_BKE: Float[Array, "B K E"],
    k_BKE: Float[Array, "B K E"],
    v_BHV: Float[Array, "B H V"],
    decay_BH: Float[Array, "B H"],
    strength_BH: Float[Array, "B H"],
    memory_BHEV: Float[Array, "B H E V"],
) -> tuple[Float[Array, "B H V"], Float[Array, "B H E V"]]:
    """Apply the rule to one token per row; return the result and the memory after it, both fp32.

    Queries and keys are raw: they are normalized here.
    """
    q_BHE, k_BHE = of_heads(q_BKE, k_BKE, v_BHV.shape[1])
    memory_BHEV = memory_BHEV * jnp.exp(decay_BH)[..., None, None]
    # Sums of products, not matrix products: one vector per matrix, limited by reading the matrix.
    known_BHV = jnp.sum(memory_BHEV * k_BHE[..., None], axis=2)
    new_BHV = strength_BH[..., None] * (v_BHV.astype(jnp.float32) - known_BHV)
    memory_BHEV = memory_BHEV + k_BHE[..., None] * new_BHV[:, :, None]
    return jnp.sum(memory_BHEV * q_BHE[..., None], axis=2), memory_BHEV


def read_rows(
    q_BTKE: Float[Array, "B T K E"],
    k_BTKE: Float[Array, "B T K E"],
    v_BTHV: Float[Array, "B T H V"],
    decay_BTH: Float[Array, "B T H"],
    strength_BTH: Float[Array, "B T H"],
    segments_BT: Int[Array, "B T"],
    memory_BHEV: Float[Array, "B H E V"] | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H E V"]]:
    """Apply the rule to rows of packed segments; return the results and the memory after each row, both fp32.

    ``memory_BHEV`` is what the first segment of each row has in memory already; None: nothing. Segments are
    numbered from 1 in ascending order, and padding, 0, is at the end of a row: it leaves the memory as it is.
    Queries and keys are raw: they are normalized here.
    """
    b, t, heads, width = k_BTKE.shape
    group, v_width = v_BTHV.shape[2] // heads, v_BTHV.shape[3]
    is_token_BT1 = (segments_BT > 0)[..., None]
    decay_BTH, strength_BTH = (
        jnp.where(is_token_BT1, x.astype(jnp.float32), 0.0) for x in (decay_BTH, strength_BTH)
    )
    segments_BT = lax.cummax(segments_BT, axis=1)  # padding continues the last segment, writing nothing
    chunks = -(-t // CHUNK)
    span = max(size for size in range(1, SPAN + 1) if chunks % size == 0)

    def cut(x: Array, *heads: int) -> Array:
        """[B, T, ...] -> [spans, B, N, C, *heads]"""
        behind = ((0, 0), (0, chunks * CHUNK - t), *[(0, 0)] * (x.ndim - 2))
        x = jnp.pad(x, behind) if heads else jnp.pad(x, behind, mode="edge")
        return jnp.moveaxis(x.reshape(b, chunks // span, span, CHUNK, *heads), 1, 0)

    parts = (
        cut(q_BTKE, heads, width),
        cut(k_BTKE, heads, width),
        cut(v_BTHV, heads, group, v_width),
        cut(decay_BTH, heads, group),
        cut(strength_BTH, heads, group),
        cut(segments_BT),
    )
    if memory_BHEV is None:
        memory_BHEV = jnp.zeros((b, heads * group, width, v_width), jnp.float32)
    memory_BKGEV = memory_BHEV.astype(jnp.float32).reshape(b, heads, group, width, v_width)
    start = _varying_as(parts, memory_BKGEV.swapaxes(2, 3)), segments_BT[:, 0]
    # Of each span, the backward pass finds the memory before it and computes the rest again.
    (memory_BKEGV, _), o = lax.scan(jax.checkpoint(_read_span, prevent_cse=False), start, parts)
    o_BTHV = jnp.moveaxis(o, 0, 1).reshape(b, chunks * CHUNK, heads * group, v_width)[:, :t]
    return o_BTHV, memory_BKEGV.swapaxes(2, 3).reshape(b, heads * group, width, v_width)


def _read_span(carry: tuple[Array, Array], parts: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
    """Read the next chunks of all rows: first what needs no memory, all at once, then one after another.

    ``carry`` is the memory [B, K, E, G, V] and the segment of the last token before.
    """
    memory, segment_B = carry
    q_BNCKE, k_BNCKE, v_BNCKGV, decay_BNCKG, strength_BNCKG, segments_BNC = parts
    chunk = q_BNCKE.shape[2]
    q_BNKCE = (unit(q_BNCKE) * q_BNCKE.shape[-1] ** -0.5).swapaxes(2, 3)
    k_BNKCE = unit(k_BNCKE).swapaxes(2, 3)
    v_BNKGCV = jnp.moveaxis(v_BNCKGV.astype(jnp.float32), 2, 4)
    strength_BNKGC = jnp.moveaxis(strength_BNCKG, 2, 4)
    sum_BNKGC = jnp.moveaxis(jnp.cumsum(decay_BNCKG, axis=2), 2, 4)

    place_C = jnp.arange(chunk)
    is_before_IJ = place_C[:, None] >= place_C[None]
    is_same_BNIJ = segments_BNC[..., :, None] == segments_BNC[..., None, :]
    is_seen = (is_before_IJ[None, None] & is_same_BNIJ)[:, :, None, None]
    # Masked before the exponential, which would overflow for later tokens.
    fade = jnp.exp(jnp.where(is_seen, sum_BNKGC[..., :, None] - sum_BNKGC[..., None, :], -jnp.inf))
    alike_BNKIJ = product("BNKIE,BNKJE->BNKIJ", k_BNKCE, k_BNKCE)
    is_strict_IJ = (place_C[:, None] > place_C[None])[None, None, None, None]
    lower = jnp.where(is_strict_IJ, alike_BNKIJ[:, :, :, None] * fade, 0.0) * strength_BNKGC[..., None]
    inverse_BNKGIJ = unit_lower_inverse(lower)
    scores_BNKGIJ = product("BNKIE,BNKJE->BNKIJ", q_BNKCE, k_BNKCE)[:, :, :, None] * fade

    last_BN = segments_BNC[:, :, -1]
    before_BN = jnp.concatenate([segment_B[:, None], last_BN[:, :-1]], axis=1)
    goes_on_BNC = segments_BNC == before_BN[..., None]
    is_kept_BNC = segments_BNC == last_BN[..., None]
    sum_BNKG = sum_BNKGC[..., -1]
    reach_BNKGC = jnp.where(goes_on_BNC[:, :, None, None], jnp.exp(sum_BNKGC), 0.0)
    rest_BNKGC = jnp.where(is_kept_BNC[:, :, None, None], jnp.exp(sum_BNKG[..., None] - sum_BNKGC), 0.0)
    lasts_BNKG = jnp.where((last_BN == before_BN)[:, :, None, None], jnp.exp(sum_BNKG), 0.0)

    def read_chunk(memory: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        q_BKCE, k_BKCE, v_BKGCV, strength, reach, rest, lasts_BKG, inverse, scores = chunk
        known_BKGCV = product("BKCE,BKEGV->BKGCV", k_BKCE, memory) * reach[..., None]
        new_BKGCV = product("BKGIJ,BKGJV->BKGIV", inverse, strength[..., None] * (v_BKGCV - known_BKGCV))
        o_BKGCV = product("BKCE,BKEGV->BKGCV", q_BKCE, memory) * reach[..., None]
        o_BKGCV = o_BKGCV + product("BKGIJ,BKGJV->BKGIV", scores, new_BKGCV)
        written = product("BKCE,BKGCV->BKEGV", k_BKCE, new_BKGCV * rest[..., None])
        return memory * lasts_BKG[:, :, None, :, None] + written, o_BKGCV

    chunks = (q_BNKCE, k_BNKCE, v_BNKGCV, strength_BNKGC, reach_BNKGC, rest_BNKGC, lasts_BNKG)
    chunks = (*chunks, inverse_BNKGIJ, scores_BNKGIJ)
    memory, o_NBKGCV = lax.scan(read_chunk, memory, tuple(x.swapaxes(0, 1) for x in chunks))
    return (memory, last_BN[:, -1]), o_NBKGCV.transpose(1, 0, 4, 2, 3, 5)


@jax.custom_vjp
def unit_lower_inverse(lower: Float[Array, "... C C"]) -> Float[Array, "... C C"]:
    """Return the inverse of I + lower, where ``lower`` is zero on and above the diagonal.

    Blocks are joined by inv [[A, 0], [B, C]] = [[inv A, 0], [-inv C B inv A, inv C]]. A sum of powers would
    have the same result, but not in fp32: where keys are alike, its terms are huge and cancel.
    """
    size = lower.shape[-1]
    leaf = min(LEAF, size)
    inverse = _leaf_inverse(_diagonal_blocks(lower, leaf))
    while leaf < size:
        below = _diagonal_blocks(lower, 2 * leaf)[..., leaf:, :leaf]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        joint = -product("...ij,...jk->...ik", product("...ij,...jk->...ik", second, below), first)
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse = jnp.concatenate([above, jnp.concatenate([joint, second], axis=-1)], axis=-2)
        leaf *= 2
    return inverse[..., 0, :, :]


def _leaf_inverse(lower: Array) -> Array:
    """Do the same with whole matrices: products of the smallest blocks would leave a matrix unit idle."""
    place = jnp.arange(lower.shape[-1])
    inverse = jnp.broadcast_to(jnp.eye(lower.shape[-1]), lower.shape)
    half = 1
    while half < lower.shape[-1]:
        number, pair = place // half, place // (2 * half)
        is_below = (pair[:, None] == pair[None]) & (number[:, None] > number[None])
        below = jnp.where(is_below.reshape((1,) * (lower.ndim - 2) + is_below.shape), lower, 0.0)
        right = product("...ij,...jk->...ik", below, inverse)
        inverse = inverse - product("...ij,...jk->...ik", inverse, right)
        half *= 2
    return inverse


def _diagonal_blocks(x: Array, size: int) -> Array:
    """[..., C, C] -> [..., C / size, size, size]"""
    starts = range(0, x.shape[-1], size)
    return jnp.stack([x[..., at : at + size, at : at + size] for at in starts], axis=-3)


def _inverse_kept(lower: Array) -> tuple[Array, Array]:
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse: Array, grad: Array) -> tuple[Array]:
    left = product("...ji,...jk->...ik", inverse, grad)
    return (-jnp.tril(product("...ij,...kj->...ik", left, inverse), -1),)


unit_lower_inverse.defvjp(_inverse_kept, _inverse_backward)


def _varying_as(likes: tuple[Array, ...], x: Array) -> Array:
    """Mark ``x`` as differing between devices where any of ``likes`` does."""
    axes = {axis for like in likes for axis in jax.typeof(like).manual_axis_type.varying}
    return varying(x, *sorted(axes)) if axes else x
