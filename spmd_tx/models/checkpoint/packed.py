"""Matrices that are encoded in a device's memory, and decoded where they are multiplied.

Decoded numbers are those that encodings.py gives while loading, but that numbers below the least normal one
may become zero.

Dimension key: I input width, O output width, n numbers in a byte, J inputs that share a scale.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from spmd_tx.models.declared.encoding import DeviceEncoding, Fp8Blocks, Int8Groups, Mxfp4
from spmd_tx.sharding.tree_node import TreeNode, static

INT4_OFFSET, INT8_OFFSET = 8, 128
SIGN_OF_FP8 = 128
# What brings the exponents of e4m3 and e2m1 to those of fp32.
FP8_EXPONENT, FP4_EXPONENT = 120, 126


class Packed(TreeNode):
    """Holds encoded matrices [..., I, O].

    A byte has numbers of neighbouring inputs, the first one in its lower half. Scales of blocks are repeated
    for each output.
    """

    numbers: Any  # uint8 [..., I / n, O]
    scales: Any  # [..., I / J, O], of scale_dtype
    encoding: DeviceEncoding = static()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the decoded matrices."""
        *lead, rows, columns = self.numbers.shape
        return (*lead, rows * self.encoding.of_byte, columns)

    @property
    def ndim(self) -> int:
        return self.numbers.ndim


Matrix = Array | Packed


def scale_dtype(encoding: DeviceEncoding) -> DTypeLike:
    """Return the type of scales, which is that of checkpoints where they have such."""
    if isinstance(encoding, Mxfp4):
        return jnp.uint8
    return jnp.float32 if isinstance(encoding, Fp8Blocks) else jnp.bfloat16


def decoded(matrix: Matrix, dtype: DTypeLike) -> Array:
    """Decode matrices [..., I, O], rounding to bfloat16 as loading does; arrays are returned as they are."""
    if not isinstance(matrix, Packed):
        return matrix
    encoding, shape = matrix.encoding, matrix.shape
    repeats = encoding.group // encoding.of_byte
    scales = jnp.repeat(scale_values(encoding, matrix.scales), repeats, axis=-2)
    parts = [rounded(part * scales, dtype) for part in values(encoding, matrix.numbers)]
    return parts[0] if len(parts) == 1 else jnp.stack(parts, axis=-2).reshape(shape)


def values(encoding: DeviceEncoding, numbers: Array) -> tuple[Array, ...]:
    """Return the n numbers of each byte, in fp32 and without their scales. Kernels use it, too."""
    wide = numbers.astype(jnp.int32)
    if isinstance(encoding, Fp8Blocks):
        return (_fp8(wide),)
    if isinstance(encoding, Int8Groups):
        return ((wide - INT8_OFFSET).astype(jnp.float32),)
    one = _fp4 if isinstance(encoding, Mxfp4) else _int4
    return one(wide & 15), one(wide >> 4)


def scale_values(encoding: DeviceEncoding, scales: Array) -> Array:
    """Return scales in fp32. Kernels use it, too."""
    if isinstance(encoding, Mxfp4):
        return _bits(scales.astype(jnp.int32) << 23)  # the exponent of an fp32
    return scales.astype(jnp.float32)


def rounded(x: Array, dtype: DTypeLike) -> Array:
    """Round decoded numbers. Kernels use it, too."""
    return x.astype(jnp.bfloat16).astype(dtype)


def _fp8(codes: Array) -> Array:
    """Compute e4m3 numbers: accelerators do it faster than they look them up."""
    size, step = codes & (SIGN_OF_FP8 - 1), (codes & 7).astype(jnp.float32) * 2.0**-9
    magnitude = jnp.where(size < 8, step, _bits((size + (FP8_EXPONENT << 3)) << 20))
    return jnp.where(codes >= SIGN_OF_FP8, -magnitude, magnitude)


def _fp4(codes: Array) -> Array:
    """Compute e2m1 numbers."""
    exponent, half = (codes >> 1) & 3, codes & 1
    normal = _bits((exponent + FP4_EXPONENT) << 23 | half << 22)
    magnitude = jnp.where(exponent == 0, 0.5 * half.astype(jnp.float32), normal)
    return jnp.where(codes >= 8, -magnitude, magnitude)


def _int4(codes: Array) -> Array:
    return (codes - INT4_OFFSET).astype(jnp.float32)


def _bits(x: Array) -> Array:
    return lax.bitcast_convert_type(x, jnp.float32)
