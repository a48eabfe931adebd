"""TPUs' attention, with its kernels run as plain programs, beside the reference."""

import re
from collections import Counter
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_tx.models.attention import flash as flash_attention
from spmd_tx.models.attention import packed_rows as attention
from spmd_tx.models.attention.packed_rows import segment_attention
from spmd_tx.sharding.mesh import DATA, TP, make_mesh
from tests.support.kernels import kernels_of

pytestmark = pytest.mark.usefixtures("quickly_compiled")

placed = jax.jit(flash_attention.place_of, static_argnums=(1, 2))
HEADS, KV_HEADS, LENGTH, BLOCK = 4, 2, 384, 128
ROWS = [[384], [100, 93, 150], [1, 7, 120, 256], []]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(flash_attention, "LONGEST_BLOCK", BLOCK)


def segments_of(rows, length=LENGTH):
    segments = np.zeros((len(rows), length), np.int32)
    for row, lengths in enumerate(rows):
        segments[row, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return jnp.asarray(segments)


def arrays(rows, width, seed=0):
    """q, k, v and the gradient of the result."""
    random = np.random.default_rng(seed)
    shapes = [(rows, LENGTH, heads, width) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    return [random.standard_normal(shape, dtype=np.float32) for shape in shapes]


@partial(jax.jit, static_argnums=(0, 6))
def results(name, segments, q, k, v, slope, window=None):
    """With a window, there are sinks, too."""
    sight = {"window": window, "sinks_N": jnp.array([-1.0, 0.5, 2.0, 7.0])} if window else {}
    y, pull_back = jax.vjp(partial(segment_attention(kernels_of(name), segments), **sight), q, k, v)
    return y, *pull_back(slope)


@cache
def usual(name, width=24):
    """Of ROWS, for all tests."""
    return jax.tree.map(np.asarray, results(name, segments_of(ROWS), *arrays(len(ROWS), width)))


@pytest.mark.parametrize("width", [pytest.param(128, marks=pytest.mark.slow), 24])
def test_results_and_gradients_are_the_references(width):
    for ours, theirs in zip(usual("mosaic", width), usual("reference", width), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-5)


@pytest.mark.parametrize("window", [pytest.param(1, marks=pytest.mark.slow), 70])
def test_windows_and_sinks_are_the_references(window, monkeypatch):
    """The reference is not asked in place of the kernels; blocks that no query sees are skipped."""
    segments = segments_of(ROWS)
    wanted = results("reference", segments, *arrays(len(ROWS), 24), window)
    monkeypatch.setattr(attention, "_reference", lambda segments: pytest.fail("the reference was asked"))
    found = results("mosaic", segments, *arrays(len(ROWS), 24), window)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-5)
    place = placed(segments, BLOCK, window)
    assert place.first[0].tolist() == ([0, 0, 1] if window == 70 else [0, 1, 2])
    assert place.last[0].tolist() == ([1, 2, 2] if window == 70 else [0, 1, 2])


def test_neither_the_place_nor_the_company_of_a_row_changes_a_bit():
    mine, others = arrays(len(ROWS), 24), arrays(len(ROWS), 24, seed=1)
    order = [2, 0, 3, 1]
    moved = [x[order] for x in mine]
    for x, other in zip(moved, others, strict=True):
        x[2:] = other[2:] * np.nan
    beside = results("mosaic", segments_of([ROWS[2], ROWS[0], [384], [10, 10]]), *moved)
    for before, after in zip(usual("mosaic"), beside, strict=True):
        assert np.array_equal(before[order[:2]], np.asarray(after)[:2])


def test_blocks_without_a_common_segment_are_skipped():
    place = placed(segments_of(ROWS), BLOCK)
    assert place.first.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 1], [0, 0, 0]]
    assert place.last.tolist() == [[2, 2, 2], [1, 2, 2], [0, 2, 2], [2, 2, 2]]
    assert place.start[1, 0, [0, 99, 100, 192, 193, 343, 383]].tolist() == [0, 0, 100, 100, 193, 343, 343]


@pytest.mark.parametrize(
    "length, block", [(64, None), (128, 128), (192, 192), (512, 512), (640, 128), (4096, 512), (520, None)]
)
def test_blocks_fill_rows(length, block, monkeypatch):
    monkeypatch.setattr(flash_attention, "LONGEST_BLOCK", 512)
    assert flash_attention.block_length(length) == block


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 2)], ids=str)
def test_a_tpu_would_run_one_kernel_forth_and_two_back(shape):
    """Lowered for TPUs, on any machine: inside shard_map, in a loop over layers that keeps what is named."""
    heads = P(DATA, None, TP)
    keep = jax.checkpoint_policies.save_only_these_names("attended")

    @jax.jit
    @partial(jax.shard_map, mesh=make_mesh(*shape), in_specs=(*[heads] * 4, P(DATA)), out_specs=(heads,) * 3)
    def gradients(q, k, v, cotangent, segments):
        attend = jax.checkpoint(
            segment_attention(kernels_of("mosaic", interpret=False), segments), policy=keep, prevent_cse=False
        )

        def loop(q, k, v):
            return jax.lax.scan(lambda x, _: (attend(x, k, v), None), q, None, length=2)[0]

        return jax.vjp(loop, q, k, v)[1](cotangent)

    q, k = (jax.ShapeDtypeStruct((4, LENGTH, n, 128), jnp.bfloat16) for n in (HEADS, KV_HEADS))
    segments = jax.ShapeDtypeStruct((4, LENGTH), jnp.int32)
    program = gradients.trace(q, k, k, q, segments).lower(lowering_platforms=("tpu",)).as_text()
    kernels = re.findall(r'kernel_name = "(\w+)"', program)
    # Before JAX 0.12 the first is there twice, but nothing reads what its second call returns: XLA drops it.
    calls = Counter(kernels)
    assert calls.pop("attention_forward") in (1, 2)
    assert calls == {"attention_grad_queries": 1, "attention_grad_keys": 1}
