"""Attention over packed rows, by the implementation that is chosen: the XLA reference, or kernels.

GPUs from NVIDIA have those of flash_triton.py and cuDNN's, and TPUs those of flash.py. They are used only
where worker/self_tests/attention.py has found their results correct on the device.

Dimension key as in backbone.py; S source (key) token, G query heads per key-value head, Q query block,
M segment of a row, counting the padding at its end.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.extend.core import Primitive
from jaxtyping import Int

from spmd_tx.models.attention import flash as flash_attention
from spmd_tx.models.attention import flash_triton
from spmd_tx.models.attention.blockwise import attend_segments
from spmd_tx.protocol.kernels import Kernels, Platform

QUERY_BLOCK = 512  # query tokens whose scores are held at once
MASKED_TOKENS = 8192  # the longest row of cudnn_masked, whose mask grows with its square
WIDEST_HEAD = 256
SEQUENCE_STEP = 64  # kernels get only rows whose length is a multiple of it

# (query [B,T,N,E], key [B,T,K,E], value [B,T,K,E]) -> attended [B,T,N,E]
Attention = Callable[..., Array]


def segment_attention(kernels: Kernels, segments_BT: Int[Array, "B T"]) -> Attention:
    """Causal attention within each packed segment.

    What depends on the segments alone is computed here, once for all layers. Layers may have a window, sinks
    and a scale, the keyword arguments of the reference; where an implementation has none of these, they have
    the reference.
    """
    is_possible = segments_BT.shape[1] % SEQUENCE_STEP == 0
    name = kernels.rows if is_possible else "reference"
    whole = IMPLEMENTATIONS[name](segments_BT, kernels.interpret)

    def attend(q_BTNE: Array, k_BTKE: Array, v_BTKE: Array, **sight: Any) -> Array:
        is_able = sight.keys() <= SIGHT.get(name, set())
        return (whole if is_able else _reference(segments_BT))(q_BTNE, k_BTKE, v_BTKE, **sight)

    return attend


def _reference(segments_BT: Array, _: bool = False) -> Attention:
    return partial(attend_segments, segments_BT=segments_BT)


def _cudnn_masked(segments_BT: Array, _: bool) -> Attention:
    """cuDNN's flash attention through JAX's public function and a mask: every score is computed."""
    if segments_BT.shape[1] > MASKED_TOKENS:
        return _reference(segments_BT)
    mask_B1TT = (segments_BT[:, :, None] == segments_BT[:, None])[:, None]

    def attend(q_BTNE: Array, k_BTKE: Array, v_BTKE: Array) -> Array:
        return jax.nn.dot_product_attention(
            q_BTNE, k_BTKE, v_BTKE, mask=mask_B1TT, is_causal=True, implementation="cudnn"
        )

    return attend


def _mosaic(segments_BT: Array, interpret: bool) -> Attention:
    """Flash attention on TPUs: only blocks of scores with a common segment are computed."""
    block = flash_attention.block_length(segments_BT.shape[1])
    if block is None:
        return _reference(segments_BT)
    whole = flash_attention.place_of(segments_BT, block)

    def attend(q_BTNE: Array, k_BTKE: Array, v_BTKE: Array, *, window: int = 0, **sinks: Array) -> Array:
        place = flash_attention.place_of(segments_BT, block, window) if window else whole
        return flash_attention.attend_blocks(q_BTNE, k_BTKE, v_BTKE, place, **sinks, interpret=interpret)

    return attend


def _triton(segments_BT: Array, interpret: bool) -> Attention:
    """Flash attention on NVIDIA GPUs: only blocks of scores with a common segment are computed."""

    def attend(q_BTNE: Array, k_BTKE: Array, v_BTKE: Array, *, window: int = 0, **sinks: Array) -> Array:
        width = q_BTNE.shape[-1]
        if not flash_triton.can_have(segments_BT.shape[1], width):
            return _reference(segments_BT)(q_BTNE, k_BTKE, v_BTKE, window=window, **sinks)
        place = flash_triton.place_of(flash_attention.starts(segments_BT, window), width)
        return flash_triton.attend_blocks(q_BTNE, k_BTKE, v_BTKE, place, **sinks, interpret=interpret)

    return attend


# (segments, Kernels.interpret) -> attention; the fastest of each platform first
IMPLEMENTATIONS: dict[str, Callable[[Array, bool], Attention]] = {
    "triton": _triton,
    "cudnn_masked": _cudnn_masked,
    "mosaic": _mosaic,
    "reference": _reference,
}
SIGHT = {name: {"window", "sinks_N"} for name in ("triton", "mosaic")}  # keyword arguments that they take


def candidates(platform: Platform, head_dim: int, is_bfloat16: bool) -> list[str]:
    """List the implementations that these sizes allow, the fastest first; the reference is always last."""
    is_possible = is_bfloat16 and head_dim % 8 == 0 and head_dim <= WIDEST_HEAD
    if platform == "cpu" or not is_possible:
        return ["reference"]
    if platform == "tpu":
        return ["mosaic", "reference"]
    return [*(["triton"] if head_dim in flash_triton.WIDTHS else []), "cudnn_masked", "reference"]


def saves_attention(primitive: Primitive, *_: object, **__: object) -> bool:
    """Policy of jax.checkpoint that keeps cuDNN's results, so that the backward pass need not rerun it."""
    return "attention_fwd" in primitive.name
