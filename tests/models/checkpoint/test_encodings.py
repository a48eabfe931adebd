"""Encoded matrices are decoded as transformers and the formats have it, on the host and on the device."""

from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest

from spmd_tx.models.checkpoint.encodings import AT_ONCE, decode, decoded_part, piece_of
from spmd_tx.models.checkpoint.packed import Packed
from spmd_tx.models.checkpoint.packed import decoded as decoded_on_device
from spmd_tx.models.declared.encoding import Fp8Blocks, Int4Groups, Mxfp4, problem
from spmd_tx.models.families.encoding import encoding_of
from spmd_tx.models.families.keys import ConfigKeys, Refusal
from spmd_tx.models.families.registry import declare
from tests.golden.families import CONFIGS
from tests.golden.parts import FP8_BLOCK, FP8_CODES, FP8_SCALES, MXFP4_BLOCKS, MXFP4_SCALES, PARTS

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
GOLDEN = np.load(PARTS)


def decoded(encoding, stored, scales, shape, dtype=np.float32):
    place = np.empty(shape, dtype)
    decode(encoding, stored, scales, place)
    return place


def test_mxfp4_is_what_transformers_reads():
    found = decoded(Mxfp4(), MXFP4_BLOCKS, MXFP4_SCALES, (2, 6, 96))
    assert np.array_equal(found.swapaxes(1, 2), GOLDEN["mxfp4"])


def test_fp8_is_what_transformers_reads():
    codes = FP8_CODES.view(ml_dtypes.float8_e4m3fn)
    found = decoded(Fp8Blocks(FP8_BLOCK, FP8_BLOCK), codes, FP8_SCALES, FP8_CODES.shape)
    assert np.array_equal(found, GOLDEN["fp8"])


def fp8(rows=11, columns=9):
    """A matrix whose last blocks are partial, with numbers of all kinds but NaN."""
    random = np.random.default_rng(1)
    codes = random.integers(0, 127, (rows, columns), dtype=np.uint8)
    codes |= random.integers(0, 2, codes.shape, dtype=np.uint8) << 7
    scales = random.random((-(-rows // 4), -(-columns // 4)), dtype=np.float32) + 0.01
    numbers = codes.view(ml_dtypes.float8_e4m3fn)
    return Fp8Blocks(4, 4), numbers, scales, numbers.shape


def int4(rows=5, columns=64):
    random = np.random.default_rng(2)
    values = random.integers(-8, 8, (rows, columns))
    scales = random.random((rows, columns // 32)).astype(BFLOAT16)
    packed = np.zeros((rows, columns // 8), np.int64)
    for place in range(8):
        packed |= (values[:, place::8] + 8) << 4 * place
    return Int4Groups(), packed.astype(np.uint32).view(np.int32), scales, values


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
def test_partial_blocks_of_fp8_have_their_own_scales(dtype):
    encoding, numbers, scales, shape = fp8()
    of_each = np.repeat(np.repeat(scales, 4, axis=0), 4, axis=1)[: shape[0], : shape[1]]
    expected = (numbers.astype(np.float32) * of_each).astype(dtype)
    assert np.array_equal(decoded(encoding, numbers, scales, shape, dtype), expected)


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
def test_integers_are_stored_plus_8_and_rounded_once(dtype):
    encoding, packed, scales, values = int4()
    expected = (values * np.repeat(scales.astype(np.float32), 32, axis=1)).astype(dtype)
    assert np.array_equal(decoded(encoding, packed, scales, values.shape, dtype), expected)


def test_a_matrix_that_is_decoded_in_several_parts_is_whole():
    rows = 2 * AT_ONCE // 32 + 5
    blocks = np.random.default_rng(3).integers(0, 256, (rows, 2, 16), dtype=np.uint8)
    scales = np.full((rows, 2), 127, np.uint8)
    found = decoded(Mxfp4(), blocks, scales, (rows, 64), BFLOAT16)
    apart = [decoded(Mxfp4(), blocks[row : row + 1], scales[:1], (1, 64), BFLOAT16) for row in (0, rows - 1)]
    assert np.array_equal(found[[0, rows - 1]], np.concatenate(apart))


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16], ids=str)
@pytest.mark.parametrize("rows", [slice(0, 11, 1), slice(3, 10, 2)], ids=str)
def test_the_device_decodes_what_the_host_does(rows, dtype):
    mxfp4 = np.random.default_rng(4).integers(100, 140, (11, 3, 17), dtype=np.uint8)
    for encoding, stored, scales in [
        fp8(11, 12)[:3],
        int4(11, 96)[:3],
        (Mxfp4(), mxfp4[..., :16], mxfp4[..., 16]),
    ]:
        columns = slice(encoding.group, 3 * encoding.group)
        matrix = encoding, stored, scales, rows, columns
        numbers, of_groups = (piece_of(piece, *matrix).T for piece in ("numbers", "scales"))
        found = jax.jit(partial(decoded_on_device, dtype=dtype))(Packed(numbers, of_groups, encoding))
        expected = decoded_part(encoding, stored, scales, rows, columns)
        assert found.dtype == dtype
        assert np.array_equal(found, expected.T)


@pytest.mark.parametrize(
    "rows, columns", [((0, 5, 1), (0, 8)), ((3, 9, 2), (5, 9)), ((4, 11, 1), (3, 4))], ids=str
)
def test_a_part_of_a_matrix_is_that_of_the_whole(rows, columns):
    """The parts cut through blocks and groups."""
    wide = tuple(8 * column for column in columns)
    mxfp4 = np.random.default_rng(4).integers(100, 140, (11, 3, 17), dtype=np.uint8)
    for encoding, stored, scales, shape, its in [
        (*fp8(), columns),
        (*int4(11, 96)[:3], (11, 96), wide),
        (Mxfp4(), mxfp4[..., :16], mxfp4[..., 16], (11, 96), wide),
    ]:
        part = slice(*rows), slice(*its)
        whole = decoded(encoding, stored, scales, shape, BFLOAT16)
        assert np.array_equal(decoded_part(encoding, stored, scales, *part), whole[part])


def test_parts_are_named_and_shaped_as_in_checkpoints():
    weight, scale = Fp8Blocks().parts("kv_a.weight", (576, 7168))
    assert (weight.shape, scale.name, scale.shape) == ((576, 7168), "kv_a.weight_scale_inv", (5, 56))
    blocks, scales = Mxfp4().parts("experts.down_proj", (32, 2880, 2880))
    assert (blocks.name, blocks.shape) == ("experts.down_proj_blocks", (32, 2880, 90, 16))
    assert (scales.name, scales.shape) == ("experts.down_proj_scales", (32, 2880, 90))
    packed, scale = Int4Groups().parts("up_proj.weight", (2048, 7168))
    assert (packed.name, packed.shape, packed.dtype) == ("up_proj.weight_packed", (2048, 896), "I32")
    assert (scale.name, scale.shape) == ("up_proj.weight_scale", (2048, 224))
    assert problem(Int4Groups(), (4, 100)) is not None
    assert problem(Fp8Blocks(), (4, 100)) is None


KIMI = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": 32}


def _packed(**weights):
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": KIMI | weights}},
    }


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, Fp8Blocks()),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, Mxfp4()),
        (_packed(), Int4Groups()),
        ({"quant_method": "fp8"}, "weight_block_size"),
        ({"quant_method": "awq"}, "'awq', which is not supported"),
        (_packed(symmetric=False), "symmetric of its compressed-tensors to False"),
        (_packed(num_bits=8), "num_bits of its compressed-tensors to 8"),
        (_packed(actorder="group"), "order of columns"),
    ],
)
def test_a_configuration_declares_an_encoding_or_is_refused(config, expected):
    if isinstance(expected, str):
        with pytest.raises(Refusal, match=expected):
            encoding_of(ConfigKeys(config))
    else:
        assert encoding_of(ConfigKeys(config)) == expected


def test_a_family_is_encoded_but_for_what_its_config_spares():
    raw = CONFIGS["glm4_moe"] | {
        "quantization_config": _packed(group_size=8) | {"ignore": ["lm_head", "re:.*self_attn.*"]}
    }
    model = declare(raw)
    found = {
        array.source.name: array.source.encoding for place in model.places for array in model.arrays(place)
    }
    encoded = {name for name, encoding in found.items() if encoding == Int4Groups(8)}
    assert "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight" in encoded
    assert "model.layers.{layer}.mlp.shared_experts.up_proj.weight" in encoded
    assert not any("self_attn" in name or "mlp.gate." in name or "norm" in name for name in encoded)
    with pytest.raises(Refusal, match="'awq', which is not supported"):
        declare(raw | {"quantization_config": {"quant_method": "awq"}})
