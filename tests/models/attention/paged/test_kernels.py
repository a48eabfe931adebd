"""The kernels are the reference, whatever pages hold behind a row's last token and whatever other rows do.

They run as plain XLA programs here; worker/self_tests/paged.py asks the same of them on a device.
"""

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from spmd_tx.models.attention.paged import mosaic, triton
from spmd_tx.models.attention.paged.attention import SHARING, candidates, paged_attention
from spmd_tx.models.attention.paged.prefixes import PrefixGroups
from spmd_tx.worker.self_tests import paged as paged_self_test
from spmd_tx.worker.self_tests.attention import AttentionSizes
from tests.support.kernels import kernels_of

pytestmark = pytest.mark.usefixtures("quickly_compiled")

KERNELS = {"mosaic": mosaic, "triton": triton}
SIZES = AttentionSizes([], heads=4, kv_heads=2, head_dim=16, page_size=16)


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    monkeypatch.setattr(KERNELS[request.param], "MOST_TOKENS", 32)
    monkeypatch.setattr(triton, "LEAST_PART", 32)
    monkeypatch.setattr(paged_self_test, "PAGES", 10)  # five blocks, of which samples have two in common
    monkeypatch.setattr(triton, "ROOM", 4)  # a program has several tiles of queries
    monkeypatch.setattr(mosaic, "SUBLANES", 4)  # as a group of rows has
    monkeypatch.setattr(paged_self_test, "SEVERAL", 20)
    monkeypatch.setattr(paged_self_test, "takes", lambda *_: True)  # also heads as narrow as these
    monkeypatch.setattr(paged_self_test, "implementation", made_once)
    return kernels_of(request.param)


MADE = {}
make = paged_self_test.implementation


def made_once(kernels, device=0, *, keeps_values=True, **sight):
    """Return what self-tests and tests ask for again and again, traced for all of them."""
    key = repr((kernels, keeps_values, sight))
    if key not in MADE:
        made = make if kernels.pages == "reference" else alone
        MADE[key] = made(kernels, device, keeps_values=keeps_values, **sight)
    return MADE[key]


def alone(kernels, _, *, keeps_values, **sight):
    """A kernel outside shard_map, in which kernels cannot be interpreted."""

    @jax.jit
    def attend(q, keys, values, tables, positions):
        pools = keys, values if keeps_values else None
        return paged_self_test.attended(kernels, q, pools, tables, positions, **sight)

    return attend


def test_a_kernel_passes_its_self_test(kernel):
    assert paged_self_test.problem_of(kernel, SIZES) is None


@pytest.mark.parametrize("tokens", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_one_row_alone_has_the_bits_that_it_has_among_others(kernel, tokens):
    """Rows that end with a full page, have a full table, share their first page, or are of one prompt."""
    q, pools, tables, positions = paged_self_test.inputs(SIZES, tokens)
    run = made_once(kernel)
    together = np.asarray(run(q, *pools, tables, positions))
    assert tables[0, 0] == tables[1, 0]
    for row in (0, 1, 3, 5):
        own = run(q[row : row + 1], *pools, tables[row : row + 1], positions[row : row + 1])
        assert np.all(np.isfinite(together[row]))
        assert np.asarray(own)[0].tobytes() == together[row].tobytes()


@pytest.mark.parametrize(
    "kernel, heads, kv_heads, head_dim, whole_parts",
    [
        pytest.param("triton", 16, 2, 16, 2, id="grouped on GPUs"),
        pytest.param("triton", 20, 1, 48, 1, id="latent on GPUs"),
        pytest.param("mosaic", 4, 2, 16, 2, id="tiles on TPUs"),
        pytest.param("mosaic", 6, 1, 16, 2, id="wide tiles on TPUs", marks=pytest.mark.slow),
    ],
    indirect=["kernel"],
)
def test_samples_read_their_prompt_once_with_the_bits_of_reading_it_alone(
    kernel, monkeypatch, heads, kv_heads, head_dim, whole_parts
):
    """In several tiles of queries. What one row reads for another, the other's table need not name."""
    monkeypatch.setattr(triton, "WIDE", 32)
    monkeypatch.setattr(triton, "ROOM", 1)
    sizes = msgspec.structs.replace(SIZES, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    q, (keys, values), tables, positions = paged_self_test.inputs(sizes, 1)
    pools = keys, None if head_dim == 48 else values
    sinks = jnp.linspace(-2.0, 2.0, heads)

    @jax.jit
    def attend(tables, positions, **shared):
        index = jnp.int32(paged_self_test.LAYER)
        return paged_attention(kernel, q, pools, index, tables, positions, sinks_N=sinks, **shared)

    find = jax.jit(SHARING[kernel.pages], static_argnums=0)
    shared = find((len(q), heads, head_dim), keys, tables, positions[:, 0])
    first, *others = paged_self_test.SAMPLES
    assert read_for(shared, first, whole_parts) == [1 + len(others)] * whole_parts
    for row in others:
        assert not any(read_for(shared, row, whole_parts))
    elsewhere = tables.copy()
    elsewhere[others, : 2 * whole_parts] = tables[0, 2:3]
    alone = np.asarray(attend(tables, positions))
    assert np.asarray(attend(elsewhere, positions, shared=shared)).tobytes() == alone.tobytes()
    assert np.asarray(attend(elsewhere, positions)).tobytes() != alone.tobytes()


def read_for(shared, row, parts):
    """Return for how many rows a row reads each of its first parts."""
    if isinstance(shared, PrefixGroups):
        step = shared.rows.tolist().index(row)
        return [int(shared.members[step]) for _ in range(shared.blocks[step])][:parts]
    return shared.counts[row, :parts].tolist()


def test_it_passes_with_windows_and_sinks(kernel):
    """The window is shorter than a block, and what stands before it may be anything."""
    with_sight = msgspec.structs.replace(SIZES, heads=6, windows=(25,), has_sinks=True)  # in threes
    assert paged_self_test.problem_of(kernel, with_sight) is None


@pytest.mark.parametrize("kernel", ["triton"], indirect=True)
def test_it_passes_with_latent_pages_whose_width_is_no_power_of_two(kernel, monkeypatch):
    """And with more heads than one program has queries."""
    monkeypatch.setattr(triton, "WIDE", 16)
    monkeypatch.setattr(triton, "SEVERAL_QUERIES", 32)
    latent = msgspec.structs.replace(SIZES, heads=20, kv_heads=1, head_dim=48, keeps_values=False)
    assert paged_self_test.problem_of(kernel, latent) is None


@pytest.mark.parametrize("kernel", ["triton"], indirect=True)
def test_the_self_test_finds_what_a_kernel_reads_behind_the_last_token(kernel, monkeypatch):
    shown = paged_self_test.inputs

    def one_further(sizes, *how):
        q, pools, tables, positions = shown(sizes, *how)
        return q, pools, tables, np.where(positions < 0, positions, positions + 1)

    monkeypatch.setattr(paged_self_test, "inputs", one_further)
    assert "off by nan" in paged_self_test.problem_of(kernel, SIZES)


@pytest.mark.parametrize(
    "platform, head_dim, page_size, is_bfloat16, expected",
    [
        ("tpu", 128, 16, True, ["mosaic", "reference"]),
        ("tpu", 64, 16, True, ["reference"]),
        ("tpu", 128, 8, True, ["reference"]),
        ("gpu", 64, 16, True, ["triton", "reference"]),
        ("gpu", 96, 16, True, ["triton", "reference"]),
        ("gpu", 100, 16, True, ["reference"]),
        ("gpu", 576, 32, True, ["triton", "reference"]),
        ("gpu", 576, 64, True, ["reference"]),
        ("gpu", 1024, 16, True, ["reference"]),
        ("tpu", 512, 16, True, ["reference"]),
        ("gpu", 128, 15, True, ["reference"]),
        ("gpu", 128, 16, False, ["reference"]),
        ("cpu", 128, 16, True, ["row_by_row"]),
    ],
)
def test_only_sizes_that_a_kernel_can_have_are_tried(platform, head_dim, page_size, is_bfloat16, expected):
    assert candidates(platform, head_dim, page_size, is_bfloat16) == expected
