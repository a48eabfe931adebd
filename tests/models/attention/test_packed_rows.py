import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import PartitionSpec as P

from spmd_tx.models.attention.packed_rows import (
    candidates,
    saves_attention,
    segment_attention,
)
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.mesh import DATA, TP, make_mesh

pytestmark = pytest.mark.usefixtures("quickly_compiled")

HEADS, KV_HEADS, WIDTH = 8, 4, 16
MASKED = "__cudnn$fmhaScaleBiasSoftmax"


def rows_of(*rows, length):
    """Segment numbers of rows with segments of these lengths."""
    segments = np.zeros((len(rows), length), np.int32)
    for row, lengths in enumerate(rows):
        segments[row, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return jnp.asarray(segments)


def qkv(rows, length):
    random = np.random.default_rng(0)
    shapes = [(rows, length, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2)], ids=str)
def test_what_a_gpu_would_run_with_a_mask_is_one_kernel_forth_and_one_back(monkeypatch, shape):
    """Lowered for CUDA, on any machine: inside shard_map, in a loop over layers."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91500)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    heads = P(DATA, None, TP)

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=make_mesh(*shape),
        in_specs=(*[heads] * 4, P(DATA)),
        out_specs=(heads,) * 3,
    )
    def gradients(q, k, v, cotangent, segments):
        attend = jax.checkpoint(
            segment_attention(Kernels(rows="cudnn_masked"), segments), policy=saves_attention
        )

        def loop(q, k, v):
            return jax.lax.scan(lambda x, _: (attend(x, k, v), None), q, None, length=2)[0]

        return jax.vjp(loop, q, k, v)[1](cotangent)

    rows, length = 4, 128
    q, k = (jax.ShapeDtypeStruct((rows, length, n, WIDTH), jnp.bfloat16) for n in (HEADS, KV_HEADS))
    segments = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    program = gradients.trace(q, k, k, q, segments).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @(__cudnn\$\w+)\(.*? : \((.*?)\) -> ", program)
    assert [name for name, _ in calls] == [MASKED, f"{MASKED}Backward"]
    local = f"tensor<{rows // shape[0]}x{length}x{HEADS // shape[2]}x{WIDTH}xbf16>"
    assert calls[0][1].startswith(local)


@pytest.mark.parametrize(
    "platform, head_dim, is_bfloat16, expected",
    [
        ("gpu", 128, True, ["triton", "cudnn_masked", "reference"]),
        ("gpu", 96, True, ["cudnn_masked", "reference"]),
        ("tpu", 128, True, ["mosaic", "reference"]),
        ("cpu", 128, True, ["reference"]),
        ("gpu", 128, False, ["reference"]),
        ("tpu", 128, False, ["reference"]),
        ("gpu", 100, True, ["reference"]),
        ("gpu", 512, True, ["reference"]),
    ],
)
def test_kernels_are_tried_where_there_are_some(platform, head_dim, is_bfloat16, expected):
    assert candidates(platform, head_dim, is_bfloat16) == expected


def test_rows_of_odd_length_are_left_to_the_reference():
    segments = rows_of([20], length=20)
    kernel, reference = (
        jax.jit(segment_attention(Kernels(rows=name), segments)) for name in ("cudnn_masked", "reference")
    )
    np.testing.assert_array_equal(kernel(*qkv(1, 20)), reference(*qkv(1, 20)))
