"""Attention over packed rows, by the name of an implementation: the XLA reference, or kernels.

GPUs from NVIDIA have those of cuDNN, and TPUs those of flash.py. They are used only where
worker/self_tests/attention.py has found their results correct on the device.

Dimension key as in backbone.py; S source (key) token, G query heads per key-value head, Q query block,
M segment of a row, counting the padding at its end.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jaxtyping import Bool, Float, Int

from spmd_tx.models.attention import flash as flash_attention
from spmd_tx.models.attention.blockwise import attend_segments
from spmd_tx.models.layers import product
from spmd_tx.protocol.commands import SEGMENTS_PER_ROW

QUERY_BLOCK = 512  # query tokens whose scores are held at once
MASKED_TOKENS = 8192  # the longest row of cudnn_masked, whose mask grows with its square
WIDEST_HEAD = 256
SEQUENCE_STEP = 64  # cuDNN gets only rows whose length is a multiple of it

# (query [B,T,N,E], key [B,T,K,E], value [B,T,K,E]) -> attended [B,T,N,E]
Attention = Callable[..., Array]


def attend_keys(
    q_BTNE: Float[Array, "B T N E"],
    k_BSKE: Float[Array, "B S K E"],
    v_BSKE: Float[Array, "B S K E"],
    mask_BTS: Array,
) -> Float[Array, "B T N E"]:
    """Softmax attention over the allowed keys; grouped queries; scores and softmax in fp32."""
    b, t, n, e = q_BTNE.shape
    q_BTKGE = q_BTNE.reshape(b, t, k_BSKE.shape[2], -1, e)
    scores = product("BTKGE,BSKE->BKGTS", q_BTKGE, k_BSKE) * e**-0.5
    # A large finite number, not -inf: rows of pure padding must stay finite.
    scores = jnp.where(mask_BTS[:, None, None], scores, -1e30)
    probabilities = jax.nn.softmax(scores, axis=-1).astype(v_BSKE.dtype)
    return jnp.einsum("BKGTS,BSKE->BTKGE", probabilities, v_BSKE).reshape(b, t, n, e)


def segment_attention(implementation: str, segments_BT: Int[Array, "B T"]) -> Attention:
    """Causal attention within each packed segment, by a name of IMPLEMENTATIONS.

    What depends on the segments alone is computed here, once for all layers. Layers may have a window, sinks
    and a scale, the keyword arguments of the reference; where an implementation has none of these, they have
    the reference.
    """
    is_possible = segments_BT.shape[1] % SEQUENCE_STEP == 0
    name = implementation if is_possible else "reference"
    whole = IMPLEMENTATIONS[name](segments_BT)

    def attend(q_BTNE: Array, k_BTKE: Array, v_BTKE: Array, **sight: Any) -> Array:
        is_able = sight.keys() <= SIGHT.get(name, set())
        return (whole if is_able else _reference(segments_BT))(q_BTNE, k_BTKE, v_BTKE, **sight)

    return attend


def _reference(segments_BT: Array) -> Attention:
    return partial(attend_segments, segments_BT=segments_BT)


def _cudnn(segments_BT: Array) -> Attention:
    """cuDNN's flash attention with packed sequences: only scores within segments are computed."""
    lengths_BM, offsets_BM, fits_B = segment_bounds(segments_BT, SEGMENTS_PER_ROW + 1)

    def attend(q_BTNE: Array, k_BTKE: Array, v_BTKE: Array) -> Array:
        from jax._src.cudnn import fused_attention_stablehlo as cudnn  # no public function packs

        if jax.__version_info__ < (0, 11, 2):
            # These versions index keys by the queries' stride (jax#39521), so the two are made equal.
            groups = q_BTNE.shape[2] // k_BTKE.shape[2]
            k_BTKE, v_BTKE = (jnp.repeat(x, groups, axis=2) for x in (k_BTKE, v_BTKE))
        # Rows that break the packing rules of protocol/commands.py must not give plausible numbers.
        nan = jnp.full((), jnp.nan, q_BTNE.dtype)
        y_BTNE = cudnn.dot_product_attention(
            jnp.where(fits_B[:, None, None, None], q_BTNE, nan),
            k_BTKE,
            v_BTKE,
            q_seqlen=lengths_BM,
            kv_seqlen=lengths_BM,
            q_offsets=offsets_BM,
            kv_offsets=offsets_BM,
            scale=q_BTNE.shape[-1] ** -0.5,
            mask_type=cudnn.MaskType.PADDING_CAUSAL,
        )
        return cast(Array, y_BTNE)

    return attend


def _cudnn_masked(segments_BT: Array) -> Attention:
    """cuDNN's flash attention through JAX's public function and a mask: every score is computed."""
    if segments_BT.shape[1] > MASKED_TOKENS:
        return _reference(segments_BT)
    mask_B1TT = (segments_BT[:, :, None] == segments_BT[:, None])[:, None]

    def attend(q_BTNE: Array, k_BTKE: Array, v_BTKE: Array) -> Array:
        return jax.nn.dot_product_attention(
            q_BTNE, k_BTKE, v_BTKE, mask=mask_B1TT, is_causal=True, implementation="cudnn"
        )

    return attend


def _mosaic(segments_BT: Array) -> Attention:
    """Flash attention on TPUs: only blocks of scores with a common segment are computed."""
    block = flash_attention.block_length(segments_BT.shape[1])
    if block is None:
        return _reference(segments_BT)
    whole = flash_attention.place_of(segments_BT, block)

    def attend(q_BTNE: Array, k_BTKE: Array, v_BTKE: Array, *, window: int = 0, **sinks: Array) -> Array:
        place = flash_attention.place_of(segments_BT, block, window) if window else whole
        return flash_attention.attend_blocks(q_BTNE, k_BTKE, v_BTKE, place, **sinks)

    return attend


IMPLEMENTATIONS: dict[str, Callable[[Array], Attention]] = {  # the fastest of each platform first
    "cudnn": _cudnn,
    "cudnn_masked": _cudnn_masked,
    "mosaic": _mosaic,
    "reference": _reference,
}
SIGHT = {"mosaic": {"window", "sinks_N"}}  # the keyword arguments that implementations take
OF_PLATFORM = {"gpu": ("cudnn", "cudnn_masked"), "tpu": ("mosaic",)}


def candidates(platform: str, head_dim: int, is_bfloat16: bool) -> list[str]:
    """List the implementations that these sizes allow, the fastest first; the reference is always last."""
    is_possible = is_bfloat16 and head_dim % 8 == 0 and head_dim <= WIDEST_HEAD
    return [*(OF_PLATFORM.get(platform, ()) if is_possible else ()), "reference"]


def segment_bounds(
    segments_BT: Int[Array, "B T"], most: int
) -> tuple[Int[Array, "B M"], Int[Array, "B M1"], Bool[Array, " B"]]:
    """Return each row's segment lengths and offsets, as cuDNN takes them, and whether ``most`` suffices.

    A segment ends where the number changes, so the padding at a row's end is a segment, too: outputs and
    gradients of positions outside all segments would stay unset. Unused entries are -1.
    """
    begins_BT = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    number_BT = jnp.cumsum(begins_BT, axis=1, dtype=jnp.int32) - 1
    is_its_BTM = number_BT[:, :, None] == jnp.arange(most, dtype=jnp.int32)[None, None]
    length_BM = jnp.sum(is_its_BTM, axis=1, dtype=jnp.int32)
    first_BM = jnp.cumsum(length_BM, axis=1, dtype=jnp.int32) - length_BM
    is_there_BM = length_BM > 0
    lengths_BM = jnp.where(is_there_BM, length_BM, -1)
    offsets_BM = jnp.pad(jnp.where(is_there_BM, first_BM, -1), ((0, 0), (0, 1)), constant_values=-1)
    return lengths_BM, offsets_BM, number_BT[:, -1] < most


def saves_attention(primitive: Primitive, *_: object, **__: object) -> bool:
    """Policy of jax.checkpoint that keeps cuDNN's results, so that the backward pass need not rerun it."""
    return "attention_fwd" in primitive.name
