"""GPUs' attention, with its kernels run as plain programs, beside the reference."""

import re
from collections import Counter
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_tx.models.attention import flash, flash_triton
from spmd_tx.models.attention import packed_rows as attention
from spmd_tx.models.attention.packed_rows import segment_attention
from spmd_tx.models.remat import rematerialised
from spmd_tx.sharding.mesh import DATA, TP
from tests.models.absent_gpu import ABSENT_GPU
from tests.support.kernels import kernels_of

pytestmark = pytest.mark.usefixtures("quickly_compiled")

HEADS, KV_HEADS = 4, 2
ROWS = [[384], [100, 93, 150], [1, 7, 120, 256], []]


def segments_of(rows, length):
    segments = np.zeros((len(rows), length), np.int32)
    for row, lengths in enumerate(rows):
        segments[row, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return jnp.asarray(segments)


def arrays(rows, length, width=16, seed=0):
    """q, k, v and the gradient of the result."""
    random = np.random.default_rng(seed)
    shapes = [(rows, length, heads, width) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [random.standard_normal(shape, dtype=np.float32) for shape in shapes]


@partial(jax.jit, static_argnums=(0, 6))
def results(name, segments, q, k, v, slope, window=None):
    """With a window, there are sinks, too."""
    sight = {"window": window, "sinks_N": jnp.array([-1.0, 0.5, 2.0, 7.0])} if window else {}
    y, pull_back = jax.vjp(partial(segment_attention(kernels_of(name), segments), **sight), q, k, v)
    return y, *pull_back(slope)


@cache
def usual():
    """Of ROWS, for all tests."""
    return jax.tree.map(np.asarray, results("triton", segments_of(ROWS, 384), *arrays(len(ROWS), 384)))


@pytest.mark.parametrize(
    "rows, length, width, window",
    [
        (ROWS, 384, 16, None),
        (ROWS, 384, 32, 70),
        pytest.param(ROWS, 384, 16, 1, marks=pytest.mark.slow),
        ([[64], [30, 34], [1] * 64], 64, 16, None),
        ([[192], [65, 100]], 192, 16, None),
        pytest.param([[100, 20]], 128, 256, None, marks=pytest.mark.slow),
    ],
)
def test_results_and_gradients_are_the_references(rows, length, width, window, monkeypatch):
    segments, operands = segments_of(rows, length), arrays(len(rows), length, width)
    wanted = results("reference", segments, *operands, window)
    monkeypatch.setattr(attention, "_reference", lambda segments: pytest.fail("the reference was asked"))
    is_usual = rows is ROWS and (length, width, window) == (384, 16, None)
    found = usual() if is_usual else results("triton", segments, *operands, window)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-5)


def test_rows_and_heads_that_kernels_cannot_have_go_to_the_reference():
    for length, width in ((96, 16), (128, 24)):
        segments, operands = segments_of([[50, 20]], length), arrays(1, length, width)
        found, wanted = (results(name, segments, *operands) for name in ("triton", "reference"))
        for ours, theirs in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_only_blocks_that_see_each_other_are_read():
    place = jax.jit(lambda segments: flash_triton.place_of(flash.starts(segments), width=16))(
        segments_of([[384], [128, 200]], 384)
    )
    assert place.first_BI.tolist() == [[0, 0, 0], [0, 2, 2]], "blocks of 64 keys for 128 queries"
    assert place.end_BJ.tolist() == [[6] * 6, [2, 2, 6, 6, 6, 6]], "blocks of 64 queries"


def test_what_a_gpu_would_run_is_one_kernel_forth_and_two_back():
    """Lowered for CUDA, on any machine: inside shard_map, in a loop over layers that keeps what is named."""
    heads = P(DATA, None, TP)

    @jax.jit
    @partial(jax.shard_map, mesh=ABSENT_GPU, in_specs=(*[heads] * 4, P(DATA)), out_specs=(heads,) * 3)
    def gradients(q, k, v, slope, segments):
        def loop(q, k, v):
            attend = rematerialised(segment_attention(kernels_of("triton", interpret=False), segments), "mlp")
            return jax.lax.scan(lambda x, _: (attend(x, k, v), None), q, None, length=2)[0]

        return jax.vjp(loop, q, k, v)[1](slope)

    q, k = (jax.ShapeDtypeStruct((4, 128, n, 64), jnp.bfloat16) for n in (8, 4))
    segments = jax.ShapeDtypeStruct((4, 128), jnp.int32)
    program = gradients.trace(q, k, k, q, segments).lower(lowering_platforms=("cuda",)).as_text()
    # Before JAX 0.12 the first is there twice, but nothing reads what its second call returns: XLA drops it.
    calls = Counter(re.findall(r'name = "(attention_\w+)"', program))
    assert calls.pop("attention_forward") in (1, 2)
    assert calls == {"attention_grad_queries": 1, "attention_grad_keys": 1}


def test_neither_the_place_nor_the_company_of_a_row_changes_a_bit():
    mine, others = arrays(len(ROWS), 384), arrays(len(ROWS), 384, seed=1)
    order = [2, 0, 3, 1]
    moved = [x[order] for x in mine]
    for x, other in zip(moved, others, strict=True):
        x[2:] = other[2:] * np.nan
    beside = results("triton", segments_of([ROWS[2], ROWS[0], [384], [10, 10]], 384), *moved)
    for before, after in zip(usual(), beside, strict=True):
        np.testing.assert_array_equal(before[order[:2]], np.asarray(after)[:2])
