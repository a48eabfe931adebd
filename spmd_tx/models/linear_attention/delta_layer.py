"""A Gated DeltaNet layer (Yang et al. 2025), as in Qwen3.5: what surrounds the rule in delta_rule.py.

Runs inside shard_map; heads are split over tp, and a device's convolution runs over its own heads' channels.

Dimension key: B row, T token, O output width of a map, J tap of the convolution, C channel (queries, keys and
values of this device's heads side by side), K head of keys, H head of values, E width of a key, V width of a
value.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from spmd_tx.models.declared.delta_rule import DeltaRule
from spmd_tx.models.linear_attention import delta_memory
from spmd_tx.models.linear_attention.delta_memory import InPool
from spmd_tx.models.linear_attention.delta_rule import decay_and_strength, of_heads, read_rows, read_token
from spmd_tx.models.linear_attention.followers import inputs_before, read_in_turn
from spmd_tx.models.named import Named
from spmd_tx.sharding.mesh import TP
from spmd_tx.sharding.tree_node import TreeNode

# (name of a map) -> this device's part of its outputs for the layer's inputs [B, T, O]
Project = Callable[[str], Array]


class State(TreeNode):
    """Holds what one layer keeps of the tokens that a row has read."""

    memory: Any  # float32 [B, H, E, V], or where it is in its pool
    inputs: Any  # [B, J - 1, C]: the convolution's last inputs, the latest one last


def mix(
    sizes: DeltaRule,
    w: Named[Array],
    project: Project,
    segments_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    state: State | None = None,
    *,
    decodes: bool = False,
    depths_B: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T _"], State]:
    """Run the layer between its linear maps; return what "out" takes, and the state after each row.

    ``state`` is what the first segment of each row has read before; None: nothing. With ``decodes`` there is
    one token per row, which is not padding. Where its memory is in a pool, the state after it has the pool.
    ``depths_B`` as in StateSlots; what is read before followers counts only for their leaders.
    """
    tp = lax.axis_size(TP)
    assert not sizes.k_heads % tp, f"{sizes.k_heads} heads of keys cannot be split {tp} ways"
    u_BTC = jnp.concatenate([project("q"), project("k"), project("v")], axis=-1)
    taps_CJ = _own_channels(sizes, w.taps[:, 0])
    before_BJC = None if state is None else state.inputs
    if before_BJC is not None and depths_B is not None:
        before_BJC = inputs_before(before_BJC, u_BTC[:, 0], depths_B)
    c_BTC, inputs_BJC = convolve(u_BTC, taps_CJ, segments_BT, positions_BT, before_BJC)
    q, k, v = jnp.split(c_BTC, [sizes.keys // tp, 2 * sizes.keys // tp], axis=-1)
    q_BTKE, k_BTKE = (x.reshape(*x.shape[:2], -1, sizes.k_width) for x in (q, k))
    v_BTHV = v.reshape(*v.shape[:2], -1, sizes.v_width)
    rule = decay_and_strength(project("a"), project("b"), w.a_log, w.dt_bias)
    if decodes:
        assert state is not None
        decay_BH, strength_BH = (x[:, 0] for x in rule)
        token = q_BTKE[:, 0], k_BTKE[:, 0], v_BTHV[:, 0], decay_BH, strength_BH
        read = partial(_read_in_pool if isinstance(state.memory, InPool) else read_token, *token)
        if depths_B is None:
            o_BHV, memory_BHEV = read(state.memory)
        else:
            o_BHV, memory_BHEV = read_in_turn(read, state.memory, depths_B, token[2])
        o_BTHV = o_BHV[:, None]
    else:
        memory_BHEV = None if state is None else state.memory
        o_BTHV, memory_BHEV = read_rows(q_BTKE, k_BTKE, v_BTHV, *rule, segments_BT, memory_BHEV)
    z_BTHV = project("z").reshape(o_BTHV.shape)
    y_BTHV = gated_norm(o_BTHV, z_BTHV, w.norm, sizes.eps).astype(z_BTHV.dtype)
    return y_BTHV.reshape(*y_BTHV.shape[:2], -1), State(memory_BHEV, inputs_BJC)


def _read_in_pool(
    q_BKE: Array, k_BKE: Array, v_BHV: Array, decay_BH: Array, strength_BH: Array, where: InPool
) -> tuple[Array, Array]:
    """Do as delta_rule.read_token does, and return the whole pool."""
    q_BHE, k_BHE = of_heads(q_BKE, k_BKE, v_BHV.shape[1])
    rule = jnp.exp(decay_BH), strength_BH, where
    return delta_memory.read_token(q_BHE, k_BHE, v_BHV.astype(jnp.float32), *rule)


def _own_channels(sizes: DeltaRule, taps_CJ: Array) -> Array:
    """Return the taps of this device's queries, keys and values."""
    tp, parts = lax.axis_size(TP), jnp.split(taps_CJ, [sizes.keys, 2 * sizes.keys])
    if tp == 1:
        return taps_CJ
    widths = (part.shape[0] // tp for part in parts)
    own = (lax.dynamic_slice_in_dim(p, lax.axis_index(TP) * w, w) for p, w in zip(parts, widths, strict=True))
    return jnp.concatenate(list(own))


def convolve(
    x_BTC: Float[Array, "B T C"],
    taps_CJ: Float[Array, "C J"],
    segments_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    before_BJC: Float[Array, "B _ C"] | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B _ C"]]:
    """Apply each channel's causal convolution, and silu, within each segment.

    Return the inputs that the next tokens of each row will need, too. ``before_BJC`` holds those of earlier
    tokens; None: there are none. Tokens count as earlier by their position, so a segment's first token, at
    position 0, sees itself only. Padding, of segment 0, is at the end of a row.
    """
    taps, t = taps_CJ.shape[1], x_BTC.shape[1]
    if before_BJC is None:
        before_BJC = jnp.zeros((x_BTC.shape[0], taps - 1, x_BTC.shape[2]), x_BTC.dtype)
    all_BSC = jnp.concatenate([before_BJC.astype(x_BTC.dtype), x_BTC], axis=1)
    y_BTC = jnp.zeros(x_BTC.shape, jnp.float32)
    for back in range(taps):
        tap_C = taps_CJ[:, taps - 1 - back].astype(jnp.float32)
        first = taps - 1 - back
        is_there_BT1 = (positions_BT >= back)[..., None]
        input_BTC = jnp.where(is_there_BT1, all_BSC[:, first : first + t], 0).astype(jnp.float32)
        y_BTC = y_BTC + tap_C[None, None] * input_BTC
    length_B = jnp.sum(segments_BT > 0, axis=1, dtype=jnp.int32)
    last_BJ = length_B[:, None] + jnp.arange(taps - 1, dtype=jnp.int32)[None]
    kept_BJC = jnp.take_along_axis(all_BSC, last_BJ[..., None], axis=1)
    return jax.nn.silu(y_BTC).astype(x_BTC.dtype), kept_BJC


def gated_norm(
    x: Float[Array, "... V"], gate: Float[Array, "... V"], weight_V: Float[Array, " V"], eps: float
) -> Float[Array, "... V"]:
    """Apply the root mean square norm over the last dimension, times silu of the gate; in fp32."""
    x32 = x.astype(jnp.float32)
    normed = x32 * lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    weight = weight_V.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
    return normed * weight * jax.nn.silu(gate.astype(jnp.float32))
