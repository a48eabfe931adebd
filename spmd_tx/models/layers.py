"""Building blocks shared by model families.

Dimension key as in backbone.py.
"""

from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from spmd_tx.sharding.collectives import varying
from spmd_tx.sharding.mesh import FSDP, TP

LOOKUPS = 1024  # rows of the embedding whose gradients are added at once


def product(formula: str, x: Array, y: Array) -> Array:
    """Compute an einsum of two arrays in the compute dtype, and keep the result in fp32.

    Its gradient is rounded to the compute dtype before the products of the backward pass. Otherwise those
    would have one operand in fp32, and take ten times as long on a GPU.
    """
    return cast(Array, _product(formula, x, y))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(formula: str, x: Array, y: Array) -> Array:
    return jnp.einsum(formula, x, y, preferred_element_type=jnp.float32)


def _product_forward(formula: str, x: Array, y: Array) -> tuple[Array, tuple[Array, Array]]:
    return product(formula, x, y), (x, y)


def _product_backward(formula: str, operands: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    def einsum(x: Array, y: Array) -> Array:
        return jnp.einsum(formula, x, y)

    return jax.vjp(einsum, *operands)[1](grad.astype(operands[0].dtype))


_product.defvjp(_product_forward, _product_backward)


@jax.custom_vjp
def _square(x: Array) -> Array:
    """Square numbers. The backward pass keeps these, which it has anyway; JAX would keep their doubles."""
    return jnp.square(x)


_square.defvjp(lambda x: (jnp.square(x), x), lambda x, slope: (slope * (2 * x),))


def rms_norm(x: Float[Array, "... W"], weight_W: Float[Array, " W"], eps: float) -> Float[Array, "... W"]:
    """Apply the root mean square norm (Zhang and Sennrich 2019) over the last dimension, in fp32."""
    x32 = x.astype(jnp.float32)
    normed = x32 * lax.rsqrt(jnp.mean(_square(x32), axis=-1, keepdims=True) + eps)
    return (normed * weight_W.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)


def embed(table_VD: Float[Array, "V _"], tokens_BT: Int[Array, "B T"], d_model: int) -> Array:
    """Embed the tokens of this device's part of the vocabulary, others as zeros: to be summed over tp.

    If the table's width is split over fsdp, every device looks up its part of the width for all rows.
    """
    is_split = table_VD.shape[1] != d_model
    if is_split:
        tokens_BT = lax.all_gather(tokens_BT, FSDP, axis=0, tiled=True)
    local_BT = tokens_BT - lax.axis_index(TP) * table_VD.shape[0]
    is_here_BT = (local_BT >= 0) & (local_BT < table_VD.shape[0])
    rows_BT = jnp.where(is_here_BT, local_BT, 0)
    x_BTD = cast(Array, _take_rows(table_VD.shape[0], table_VD, rows_BT))
    x_BTD = jnp.where(is_here_BT[..., None], x_BTD, jnp.zeros((), x_BTD.dtype))
    return lax.all_to_all(x_BTD, FSDP, split_axis=0, concat_axis=2, tiled=True) if is_split else x_BTD


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take_rows(size: int, table_VD: Array, local_BT: Array) -> Array:
    """Look rows up. The gradient is a product, since a scatter leaves the order of a sum to the device."""
    return table_VD[local_BT]


def _take_rows_forward(size: int, table_VD: Array, local_BT: Array) -> tuple[Array, Array]:
    return table_VD[local_BT], local_BT


def _take_rows_backward(size: int, local_BT: Array, grad_BTD: Array) -> tuple[Array, None]:
    chunks, width = max(1, local_BT.size // LOOKUPS), grad_BTD.shape[-1]
    while local_BT.size % chunks:
        chunks -= 1
    local_CN, grad_CND = local_BT.reshape(chunks, -1), grad_BTD.reshape(chunks, -1, width)
    row_V = jnp.arange(size, dtype=local_BT.dtype)

    def add(sum_VD: Array, chunk: tuple[Array, Array]) -> tuple[Array, None]:
        local_N, grad_ND = chunk
        is_row_NV = (local_N[:, None] == row_V[None]).astype(grad_ND.dtype)
        return sum_VD + product("NV,ND->VD", is_row_NV, grad_ND), None

    nothing = varying(jnp.zeros((size, width), jnp.float32))
    return lax.scan(add, nothing, (local_CN, grad_CND))[0].astype(grad_BTD.dtype), None


_take_rows.defvjp(_take_rows_forward, _take_rows_backward)


def rotate(
    x_BTNE: Float[Array, "B T N E"], positions_BT: Int[Array, "B T"], theta: float
) -> Float[Array, "B T N E"]:
    """Apply the rotary position embedding (Su et al. 2021), pairing the two halves, in fp32."""
    half = x_BTNE.shape[-1] // 2
    frequency_E = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BTE = positions_BT.astype(jnp.float32)[..., None] * frequency_E[None, None]
    cos, sin = jnp.cos(angle_BTE)[:, :, None], jnp.sin(angle_BTE)[:, :, None]
    first, second = jnp.split(x_BTNE.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNE.dtype)
