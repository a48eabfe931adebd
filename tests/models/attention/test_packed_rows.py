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
    segment_bounds,
)
from spmd_tx.protocol.commands import SEGMENTS_PER_ROW
from spmd_tx.sharding.mesh import DATA, TP, make_mesh

HEADS, KV_HEADS, WIDTH = 8, 4, 16
PACKED = "__cudnn$fmhaSoftmax"
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


def packed_by_the_book(q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type):
    """What cuDNN's documentation promises: places that belong to no segment are left as they were."""
    assert mask_type == cudnn.MaskType.PADDING_CAUSAL
    out = np.full(q.shape, 1e9, np.float32)
    np.testing.assert_array_equal(q_seqlen, kv_seqlen)
    np.testing.assert_array_equal(q_offsets, kv_offsets)
    q, k, v = map(np.asarray, (q, *(jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))))
    for row in range(len(q)):
        for length, start in zip(q_seqlen[row].tolist(), q_offsets[row].tolist()[:-1], strict=True):
            if length > 0:
                where = row, slice(start, start + length)
                scores = np.einsum("TNE,SNE->NTS", q[where], k[where]) * scale
                scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                weights /= weights.sum(-1, keepdims=True)
                out[where] = np.einsum("NTS,SNE->TNE", weights, v[where])
    return jnp.asarray(out)


@pytest.mark.parametrize(
    "row, lengths, starts, fits",
    [
        ([3, 3], [3, 3, 2], [0, 3, 6], True),  # the padding is a segment, too
        ([8], [8, -1, -1], [0, -1, -1], True),
        ([], [8, -1, -1], [0, -1, -1], True),
        ([1, 2, 5], [1, 2, 5], [0, 1, 3], True),
        ([1, 2, 3], [1, 2, 3], [0, 1, 3], False),  # no place for the padding
    ],
)
def test_every_place_of_a_row_belongs_to_a_segment(row, lengths, starts, fits):
    found = segment_bounds(rows_of(row, length=8), most=3)
    assert [x.tolist()[0] for x in found] == [lengths, [*starts, -1], fits]


def test_packed_attention_is_that_of_the_reference(monkeypatch):
    monkeypatch.setattr(cudnn, "dot_product_attention", packed_by_the_book)
    segments = rows_of([64], [1, 7, 30], [1] * SEGMENTS_PER_ROW, [], length=64)
    arrays = qkv(4, 64)
    want = segment_attention("reference", segments)(*arrays)
    np.testing.assert_allclose(segment_attention("cudnn", segments)(*arrays), want, atol=2e-6)


def test_a_row_of_too_many_segments_does_not_look_right(monkeypatch):
    monkeypatch.setattr(cudnn, "dot_product_attention", packed_by_the_book)
    segments = rows_of([1] * (SEGMENTS_PER_ROW + 2), [128], length=128)
    out = segment_attention("cudnn", segments)(*qkv(2, 128))
    assert np.isnan(out[0, :SEGMENTS_PER_ROW]).all()
    assert np.isfinite(out[1]).all()


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("implementation, call", [("cudnn", PACKED), ("cudnn_masked", MASKED)])
def test_what_a_gpu_would_run_is_one_kernel_forth_and_one_back(monkeypatch, shape, implementation, call):
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
        attend = jax.checkpoint(segment_attention(implementation, segments), policy=saves_attention)

        def loop(q, k, v):
            return jax.lax.scan(lambda x, _: (attend(x, k, v), None), q, None, length=2)[0]

        return jax.vjp(loop, q, k, v)[1](cotangent)

    rows, length = 4, 128
    q, k = (jax.ShapeDtypeStruct((rows, length, n, WIDTH), jnp.bfloat16) for n in (HEADS, KV_HEADS))
    segments = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    program = gradients.trace(q, k, k, q, segments).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"custom_call @(__cudnn\$\w+)\(.*? : \((.*?)\) -> \((.*?)\)", program)
    assert [name for name, _, _ in calls] == [call, f"{call}Backward"]
    local = f"tensor<{rows // shape[0]}x{length}x{HEADS // shape[2]}x{WIDTH}xbf16>"
    assert calls[0][1].startswith(local)
    if implementation == "cudnn":
        statistics = f"tensor<{rows // shape[0] * (SEGMENTS_PER_ROW + 1)}x{HEADS // shape[2]}x{length}xf32>"
        assert statistics in calls[0][2], "the log-sum-exp of every segment"
        assert statistics in calls[1][1]


@pytest.mark.parametrize(
    "platform, head_dim, is_bfloat16, expected",
    [
        ("gpu", 128, True, ["cudnn", "cudnn_masked", "reference"]),
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
    arrays = qkv(1, 20)
    want = segment_attention("reference", segments)(*arrays)
    np.testing.assert_array_equal(segment_attention("cudnn", segments)(*arrays), want)
