"""Sums of rows' gradients by every implementation; kernels run as plain programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_tx.models.adapters.row_sums import IMPLEMENTATIONS, row_sums
from spmd_tx.sharding.mesh import AXES, make_mesh
from tests.models.absent_gpu import ABSENT_GPU
from tests.support.kernels import kernels_of

ROWS, RANK, WIDTH, SLOTS = 12, 4, 256, 5
SLOT_OF_ROW = [3, 0, 0, 3, 1, 3, 0, 4, 3, 1, 0, 3]  # none has slot 2


@pytest.fixture(params=IMPLEMENTATIONS)
def add(request):
    return lambda grads, slots: on_one_device(kernels_of(request.param), SLOTS)(
        jnp.asarray(grads), jnp.asarray(slots, jnp.int32)
    )


def on_one_device(kernels, slots, mesh=None):
    """The sums as steps use them: inside shard_map, of arrays that differ between all devices."""
    everywhere = P(AXES)
    return jax.jit(
        jax.shard_map(
            lambda grads, slots_B: row_sums(kernels, grads, slots_B, slots),
            mesh=mesh or make_mesh(1, 1, 1),
            in_specs=(everywhere, everywhere),
            out_specs=everywhere,
            check_vma=not kernels.interpret,
        )
    )


def random_rows(seed=0):
    random = np.random.default_rng(seed)
    return random.standard_normal((ROWS, RANK, WIDTH), dtype=np.float32).astype(jnp.bfloat16)


def test_rows_are_added_in_their_order(add):
    rows = random_rows()
    wanted = np.zeros((SLOTS, RANK, WIDTH), np.float32)
    for row, slot in zip(rows, SLOT_OF_ROW, strict=True):
        wanted[slot] += row.astype(np.float32)
    found = add(rows, SLOT_OF_ROW)
    assert found.dtype == jnp.float32
    assert np.array_equal(found, wanted)


def test_neither_the_place_nor_the_company_of_rows_changes_a_bit(add):
    rows, others = random_rows(), random_rows(seed=1)
    before = np.asarray(add(rows, SLOT_OF_ROW))[3]
    mine = [number for number, slot in enumerate(SLOT_OF_ROW) if slot == 3]
    moved, slots = others * np.asarray(np.nan, others.dtype), [0] * ROWS
    for number, place in zip(mine, [1, 2, 5, 6, 11], strict=True):
        moved[place], slots[place] = rows[number], 2
    assert np.array_equal(np.asarray(add(moved, slots))[2], before)


@pytest.mark.parametrize("platform, call", [("tpu", "tpu_custom_call"), ("cuda", "xla.gpu.triton")])
def test_an_accelerator_would_run_one_kernel(platform, call):
    kernels = kernels_of({"tpu": "mosaic", "cuda": "triton"}[platform], interpret=False)
    shapes = jax.ShapeDtypeStruct((128, 32, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((128,), jnp.int32)
    traced = on_one_device(kernels, 8, ABSENT_GPU if platform == "cuda" else None).trace(*shapes)
    assert traced.lower(lowering_platforms=(platform,)).as_text().count(call) == 1
