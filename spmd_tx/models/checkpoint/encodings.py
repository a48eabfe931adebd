"""Decodes matrices that checkpoints store in fewer bits, while they are loaded (packed.py: on devices).

Dimension key: O output width, I input width, J numbers that share a scale, G groups of them in a row.
"""

from functools import cache

import ml_dtypes
import numpy as np

from spmd_tx.models.declared.encoding import Encoding, Fp8Blocks, Int4Groups, Mxfp4

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4_OFFSET = 8
MXFP4_BIAS = 127
AT_ONCE = 1 << 16  # bytes that are decoded at once, so that all that is computed of them stays in a cache


def decode(encoding: Encoding, stored: np.ndarray, scales: np.ndarray, place: np.ndarray) -> None:
    """Decode matrices [..., O, I] to ``place``, in its dtype: float32 or bfloat16.

    ``stored`` and ``scales`` are the parts that the encoding declares. Results are rounded once.
    """
    if place.ndim > 2:
        for one in zip(stored, scales, place, strict=True):
            decode(encoding, *one)
    elif isinstance(encoding, Fp8Blocks):
        _decode_fp8(encoding, stored, scales, place)
    elif isinstance(encoding, Mxfp4):
        _decode_mxfp4(stored, scales, place)
    else:
        _decode_int4(encoding, stored, scales, place)


def decoded_part(
    encoding: Encoding, stored: np.ndarray, scales: np.ndarray, rows: slice, columns: slice
) -> np.ndarray:
    """Return rows and columns of one matrix [O, I], in bfloat16; little more than these is decoded."""
    of_block = (encoding.rows, encoding.columns) if isinstance(encoding, Fp8Blocks) else (1, encoding.group)
    whole = _shape(encoding, stored, scales)
    (first, end), (left, right) = (
        (part.start // size * size, min(-(-part.stop // size) * size, limit))
        for part, size, limit in zip((rows, columns), of_block, whole, strict=True)
    )
    blocks = tuple(
        slice(start // size, -(-stop // size))
        for start, stop, size in zip((first, left), (end, right), of_block, strict=True)
    )
    place = np.empty((end - first, right - left), ml_dtypes.bfloat16)
    numbers = stored[first:end]
    if isinstance(encoding, Mxfp4):
        numbers = numbers[:, blocks[1]]
    else:
        of_number = 8 if isinstance(encoding, Int4Groups) else 1
        numbers = numbers[:, left // of_number : right // of_number]
    decode(encoding, numbers, scales[blocks], place)
    step = rows.step or 1
    return place[rows.start - first : rows.stop - first : step, columns.start - left : columns.stop - left]


def piece_of(
    piece: str, encoding: Encoding, stored: np.ndarray, scales: np.ndarray, rows: slice, columns: slice
) -> np.ndarray:
    """Return rows and columns of one matrix [O, I] without decoding it, as packed.py has them transposed.

    The piece is "numbers" [O, I / n], as bytes, or "scales" [O, I / J]. Columns are whole groups of numbers.
    """
    if piece == "numbers":
        size = encoding.of_byte
        return stored.reshape(len(stored), -1).view(np.uint8)[
            rows, columns.start // size : columns.stop // size
        ]
    groups = slice(columns.start // encoding.group, columns.stop // encoding.group)
    if isinstance(encoding, Fp8Blocks):
        return scales[np.arange(rows.start, rows.stop, rows.step or 1) // encoding.rows, groups]
    return scales[rows, groups]


def _shape(encoding: Encoding, stored: np.ndarray, scales: np.ndarray) -> tuple[int, ...]:
    if isinstance(encoding, Fp8Blocks):
        return stored.shape
    return (*scales.shape[:-1], scales.shape[-1] * encoding.group)


def _decode_fp8(encoding: Fp8Blocks, stored_OI: np.ndarray, scales: np.ndarray, place_OI: np.ndarray) -> None:
    """Look up all numbers of a block in a table that holds its scale already."""
    values, bits = _fp8_values(), _bits(place_OI)
    codes = stored_OI.view(np.uint8)
    for row, of_row in enumerate(scales):
        rows = slice(row * encoding.rows, (row + 1) * encoding.rows)
        tables = _bits((values * of_row[:, None].astype(np.float32)).astype(place_OI.dtype))
        for column, table in enumerate(tables):
            columns = slice(column * encoding.columns, (column + 1) * encoding.columns)
            bits[rows, columns] = _looked_up(table, codes[rows, columns])


def _decode_mxfp4(stored_OGJ: np.ndarray, scales_OG: np.ndarray, place_OI: np.ndarray) -> None:
    """Look up each byte together with its scale, and get two numbers at once."""
    pairs = _mxfp4_pairs(place_OI.dtype)
    groups, bytes_of_group = stored_OGJ.shape[1:]
    rows = max(1, AT_ONCE // (groups * bytes_of_group))
    for first in range(0, len(stored_OGJ), rows):
        some = slice(first, first + rows)
        codes = (scales_OG[some].astype(np.uint16) << 8)[..., None] | stored_OGJ[some]
        decoded = _looked_up(pairs, codes).reshape(len(codes), -1)
        place_OI[some] = decoded.view(place_OI.dtype)


def _decode_int4(
    encoding: Int4Groups, stored_OI: np.ndarray, scales_OG: np.ndarray, place_OI: np.ndarray
) -> None:
    pairs = _int4_pairs()
    codes_OI = np.ascontiguousarray(stored_OI).astype("<i4", copy=False).view(np.uint8)
    groups = scales_OG.shape[1]
    rows = max(1, AT_ONCE // codes_OI.shape[1])
    for first in range(0, len(codes_OI), rows):
        some = slice(first, first + rows)
        values = _looked_up(pairs, codes_OI[some]).view(np.float32).reshape(-1, groups, encoding.group)
        values *= scales_OG[some].astype(np.float32)[..., None]
        place_OI[some] = values.reshape(-1, place_OI.shape[1])


def _looked_up(table: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return the table's entries, without the check of bounds that takes as long."""
    return table.take(codes, mode="clip")


def _bits(x: np.ndarray) -> np.ndarray:
    """View floating-point numbers as integers, which NumPy moves faster."""
    return x.view({2: np.uint16, 4: np.uint32}[x.dtype.itemsize])


@cache
def _fp8_values() -> np.ndarray:
    return np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


@cache
def _mxfp4_pairs(dtype: np.dtype) -> np.ndarray:
    """Return the two numbers of a byte with a scale, by scale times 256 plus byte, as one integer."""
    values = np.array(FP4, np.float64)
    codes = np.arange(256)
    pairs = np.stack([values[codes & 15], values[codes >> 4]], axis=-1)
    scales = 2.0 ** (np.arange(256) - MXFP4_BIAS)
    with np.errstate(over="ignore"):  # of scales that no weight has
        scaled = (pairs[None] * scales[:, None, None]).astype(np.float32).astype(dtype)
    return np.ascontiguousarray(scaled.reshape(-1, 2)).view({2: np.uint32, 4: np.uint64}[dtype.itemsize])[
        :, 0
    ]


@cache
def _int4_pairs() -> np.ndarray:
    """Return the two numbers of a byte, in fp32, as one integer."""
    codes = np.arange(256)
    pairs = np.stack([codes & 15, codes >> 4], axis=-1) - INT4_OFFSET
    return np.ascontiguousarray(pairs.astype(np.float32)).view(np.uint64)[:, 0]
