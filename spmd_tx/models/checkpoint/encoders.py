"""Encodes matrices as checkpoints store them in fewer bits: the way back from encodings.py.

Dimension key: O output width, I input width, J numbers that share a scale, G groups of them in a row.
"""

import ml_dtypes
import numpy as np

from spmd_tx.models.checkpoint.encodings import FP4, INT4_OFFSET, MXFP4_BIAS
from spmd_tx.models.declared.encoding import (
    DeviceEncoding,
    Encoding,
    Fp8Blocks,
    Int4Groups,
    Int8Groups,
    Mxfp4,
)

FP8_MOST = 448.0  # of e4m3
FP4_EXPONENT = 2  # of 6, the largest of e2m1
INT4_MOST = 7
INT8_MOST, INT8_OFFSET = 127, 128
OF_WORD = 8  # 4-bit integers in an int32


def encode(encoding: Encoding, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the two parts that the encoding declares of a float32 matrix [O, I].

    Each number becomes the nearest one that its block's or group's scale allows; the scale is such that the
    largest still fits.
    """
    if isinstance(encoding, Fp8Blocks):
        return _encode_fp8(encoding, matrix)
    if isinstance(encoding, Mxfp4):
        return _encode_mxfp4(encoding, matrix)
    return _encode_int4(encoding, matrix)


def encode_groups(encoding: DeviceEncoding, matrix_OI: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Encode a float32 matrix row by row as devices keep it: bytes [O, I / n] and scales [O, I / J].

    I is a multiple of J, and blocks of FP8 have one row.
    """
    if isinstance(encoding, Fp8Blocks):
        groups_OGJ = matrix_OI.reshape(len(matrix_OI), -1, encoding.columns)
        scales = np.abs(groups_OGJ).max(-1) / np.float32(FP8_MOST)
        scales[scales == 0] = 1
        numbers = (groups_OGJ / scales[..., None]).clip(-FP8_MOST, FP8_MOST)
        return numbers.astype(ml_dtypes.float8_e4m3fn).reshape(matrix_OI.shape).view(np.uint8), scales
    if isinstance(encoding, Int8Groups):
        groups_OGJ = matrix_OI.reshape(len(matrix_OI), -1, encoding.group)
        scales = (np.abs(groups_OGJ).max(-1) / INT8_MOST).astype(ml_dtypes.bfloat16)
        scales[scales == 0] = 1
        numbers = np.rint(groups_OGJ / scales[..., None].astype(np.float32)).clip(-INT8_MOST, INT8_MOST)
        return (numbers + INT8_OFFSET).astype(np.uint8).reshape(matrix_OI.shape), scales
    numbers, scales = encode(encoding, matrix_OI)
    return np.ascontiguousarray(numbers).reshape(len(numbers), -1).view(np.uint8), scales


def _encode_fp8(encoding: Fp8Blocks, matrix_OI: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = matrix_OI.shape
    blocks = -(-rows // encoding.rows), -(-columns // encoding.columns)
    scales = np.empty(blocks, np.float32)
    stored = np.empty(matrix_OI.shape, ml_dtypes.float8_e4m3fn)
    for row, column in np.ndindex(blocks):
        place = (
            slice(row * encoding.rows, (row + 1) * encoding.rows),
            slice(column * encoding.columns, (column + 1) * encoding.columns),
        )
        block = matrix_OI[place]
        scale = np.float32(np.abs(block).max() / FP8_MOST) or np.float32(1)
        scales[row, column] = scale
        stored[place] = np.clip(block / scale, -FP8_MOST, FP8_MOST).astype(stored.dtype)
    return stored, scales


def _encode_mxfp4(encoding: Mxfp4, matrix_OI: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Choose powers of two as the OCP Microscaling specification 1.0 does, section 6.3."""
    groups = matrix_OI.reshape(len(matrix_OI), -1, encoding.group)
    _, exponents = np.frexp(np.abs(groups).max(-1))  # largest = m * 2**exponent, 0.5 <= m < 1
    exponents = np.clip(exponents - 1 - FP4_EXPONENT, -MXFP4_BIAS, MXFP4_BIAS)
    codes = _nearest_fp4(np.ldexp(groups, -exponents[..., None]))
    stored = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return stored, (exponents + MXFP4_BIAS).astype(np.uint8)


def _nearest_fp4(values: np.ndarray) -> np.ndarray:
    """Return the codes of the nearest e2m1 numbers, ties to the even code."""
    sizes = np.array(FP4[:8], np.float32)
    between = (sizes[1:] + sizes[:-1]) / 2
    magnitudes = np.abs(values)
    below, above = np.searchsorted(between, magnitudes, "left"), np.searchsorted(between, magnitudes, "right")
    codes = np.where(below % 2 == 0, below, above).astype(np.uint8)
    return codes | (np.signbit(values).astype(np.uint8) << 3)


def _encode_int4(encoding: Int4Groups, matrix_OI: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    groups = matrix_OI.reshape(len(matrix_OI), -1, encoding.group)
    scales = (np.abs(groups).max(-1) / INT4_MOST).astype(ml_dtypes.bfloat16)
    scales[scales == 0] = 1
    numbers = np.rint(groups / scales[..., None].astype(np.float32))
    codes = (np.clip(numbers, -INT4_OFFSET, INT4_MOST) + INT4_OFFSET).astype(np.uint32)
    codes = codes.reshape(len(matrix_OI), -1, OF_WORD)
    words = np.zeros(codes.shape[:2], np.uint32)
    for place in range(OF_WORD):
        words |= codes[..., place] << (4 * place)
    return words.view(np.int32), scales
