"""Checkpoints with encoded matrices are loaded as what they decode to, in all parts of a mesh."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_tx.errors import StartError
from spmd_tx.models.checkpoint import huggingface
from spmd_tx.models.checkpoint.encodings import decode
from spmd_tx.models.declared.encoding import Fp8Blocks, Int4Groups, Mxfp4
from spmd_tx.models.declared.unread import Unread
from spmd_tx.sharding.mesh import EP, FSDP, TP, make_mesh
from spmd_tx.sharding.weight import Weight
from tests.support.encoded_models import write_tensors

EXPERTS, OUT, IN = 4, 16, 64
RANDOM = np.random.default_rng(1)
FP8, INT4 = Fp8Blocks(8, 24), Int4Groups()


def bytes_of(*shape):
    return RANDOM.integers(0, 120, shape, dtype=np.uint8)


STORED = {  # tensors by name, with their types as safetensors names them
    "mixed.weight": ("F8_E4M3", bytes_of(OUT, IN)),
    "mixed.weight_scale_inv": ("F32", RANDOM.random((2, 3), dtype=np.float32)),
    "experts.gate_up_blocks": ("U8", bytes_of(EXPERTS, 2 * OUT, IN // 32, 16)),
    "experts.gate_up_scales": ("U8", bytes_of(EXPERTS, 2 * OUT, IN // 32)),
    "packed.weight_packed": ("I32", RANDOM.integers(-(2**31), 2**31, (OUT, IN // 8)).astype(np.int32)),
    "packed.weight_scale": ("F32", RANDOM.random((OUT, IN // 32), dtype=np.float32)),
}


def declared():
    """One array of each encoding [in, out], all split; the experts' gate is every second row of a tensor."""
    return {
        "fp8": Weight((IN, OUT), P(TP, FSDP), jnp.float32, "mixed.weight", True, encoding=FP8),
        "int4": Weight((IN, OUT), P(FSDP, TP), jnp.bfloat16, "packed.weight", True, encoding=INT4),
        "up": Weight(
            (EXPERTS, IN, OUT),
            P(EP, TP, FSDP),
            jnp.bfloat16,
            "experts.gate_up",
            True,
            rows=(1, 2 * OUT, 2),
            encoding=Mxfp4(),
        ),
    }


def decoded(encoding, numbers, scales, shape):
    place = np.empty(shape, jnp.bfloat16)
    decode(encoding, STORED[numbers][1], STORED[scales][1], place)
    return place.swapaxes(-1, -2)


def test_every_part_is_decoded(tmp_path):
    write_tensors(tmp_path, STORED)
    found = huggingface.load(tmp_path, declared(), make_mesh(2, 2, 2), lambda _: None, Unread())
    fp8 = decoded(FP8, "mixed.weight", "mixed.weight_scale_inv", (OUT, IN))
    int4 = decoded(INT4, "packed.weight_packed", "packed.weight_scale", (OUT, IN))
    experts = decoded(Mxfp4(), "experts.gate_up_blocks", "experts.gate_up_scales", (EXPERTS, 2 * OUT, IN))
    assert np.array_equal(found["fp8"], fp8.astype(np.float32))
    assert np.array_equal(found["int4"], int4)
    assert np.array_equal(found["up"], experts[..., 1::2])


@pytest.mark.parametrize(
    "name, tensor, reason",
    [
        ("mixed.weight", ("F32", np.zeros((OUT, IN), np.float32)), "stored as float32, .* float8_e4m3fn"),
        ("mixed.weight_scale_inv", ("U8", bytes_of(2, 3)), "stored as uint8, .* 16 bits or more"),
        ("packed.weight_scale", ("F32", np.zeros((OUT, 1), np.float32)), r"shape \[16, 1\]"),
        ("experts.gate_up_scales", None, "has no tensor 'experts.gate_up_scales'"),
    ],
)
def test_tensors_of_another_form_are_refused_before_anything_is_loaded(tmp_path, name, tensor, reason):
    tensors = {key: value for key, value in STORED.items() if key != name}
    write_tensors(tmp_path, tensors | ({name: tensor} if tensor else {}))
    with pytest.raises(StartError, match=reason):
        huggingface.load(tmp_path, declared(), make_mesh(1, 1, 1), lambda _: None)
