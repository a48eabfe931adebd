"""The kernels are the reference, whatever pages hold behind a row's last token and whatever other rows do.

They run as plain XLA programs here; worker/self_tests/paged.py asks the same of them on a device.
"""

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from spmd_tx.models.attention.paged import mosaic, triton
from spmd_tx.models.attention.paged.attention import candidates, paged_attention
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
    monkeypatch.setattr(paged_self_test, "PAGES", 5)  # three blocks
    monkeypatch.setattr(paged_self_test, "SEVERAL", 20)
    before = paged_self_test.implementation
    monkeypatch.setattr(
        paged_self_test,
        "implementation",
        lambda kernels, device, **how: (
            before(kernels, device, **how) if kernels.pages == "reference" else alone(kernels, **how)
        ),
    )
    return kernels_of(request.param)


def alone(kernels, *, keeps_values, **sight):
    """A kernel outside shard_map, in which kernels cannot be interpreted."""

    @jax.jit
    def attend(q, keys, values, tables, positions):
        index = jnp.int32(paged_self_test.LAYER)
        pools = keys, values if keeps_values else None
        return paged_attention(kernels, q, pools, index, tables, positions, **sight)

    return attend


def test_a_kernel_passes_its_self_test(kernel):
    assert paged_self_test.problem_of(kernel, SIZES) is None


@pytest.mark.parametrize("tokens", [1, 20])
def test_one_row_alone_has_the_bits_that_it_has_among_others(kernel, tokens):
    """Rows that end with a full page, have a full table, or share their first page."""
    q, pools, tables, positions = paged_self_test.inputs(SIZES, tokens)
    run = alone(kernel, keeps_values=True)
    together = np.asarray(run(q, *pools, tables, positions))
    assert tables[0, 0] == tables[1, 0]
    for row in (0, 1, 4):
        own = run(q[row : row + 1], *pools, tables[row : row + 1], positions[row : row + 1])
        assert np.all(np.isfinite(together[row]))
        assert np.asarray(own)[0].tobytes() == together[row].tobytes()


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
