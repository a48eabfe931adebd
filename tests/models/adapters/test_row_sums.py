"""Sums of rows' gradients by every implementation; kernels run as plain programs."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
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


@cache
def on_one_device(kernels, slots):
    """The sums as steps use them: inside shard_map, of arrays that differ between all devices."""
    everywhere = P(AXES)
    return jax.jit(
        jax.shard_map(
            lambda grads, slots_B: row_sums(kernels, grads, slots_B, slots),
            mesh=make_mesh(1, 1, 1),
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


CALLS = {"mosaic": "tpu_custom_call", "mosaic_gpu": "mosaic_gpu_v2", "triton": "xla.gpu.triton"}


@pytest.mark.parametrize("name", CALLS)
def test_an_accelerator_would_run_one_kernel(name):
    assert lowered(name, (128, 32, 1024)).count(CALLS[name]) == 1


def test_columns_that_are_too_few_for_a_program_of_mosaic_gpu_are_left_to_triton():
    text = lowered("mosaic_gpu", (128, 32, 3))
    assert (text.count(CALLS["mosaic_gpu"]), text.count(CALLS["triton"])) == (0, 1)


def lowered(name, shape):
    """The sums of a loop over layers, as an accelerator would get them."""
    kernels = kernels_of(name, interpret=False)
    mesh = make_mesh(1, 1, 1) if kernels.platform == "tpu" else ABSENT_GPU

    def add(_, layer, slots_B):
        sums = row_sums(kernels, layer, slots_B, SLOTS)
        assert jax.typeof(sums).manual_axis_type == jax.typeof(layer).manual_axis_type, "as derivatives must"
        return None, sums

    def layers(grads, slots_B):
        return lax.scan(partial(add, slots_B=slots_B), None, grads)[1]

    run = jax.shard_map(layers, mesh=mesh, in_specs=(P(None, AXES), P(AXES)), out_specs=P(None, AXES))
    shapes = (
        jax.ShapeDtypeStruct((2, *shape), jnp.bfloat16),
        jax.ShapeDtypeStruct(shape[:1], jnp.int32),
    )
    platform = "tpu" if kernels.platform == "tpu" else "cuda"
    return jax.jit(run).trace(*shapes).lower(lowering_platforms=(platform,)).as_text()
