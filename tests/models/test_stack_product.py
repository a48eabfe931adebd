"""The product with a stacked matrix; its kernel runs as a plain program."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import use_abstract_mesh

from spmd_tx.models import stack_product as module
from spmd_tx.models.adapters.lora import Lora, bank_lora
from spmd_tx.models.stack_product import reads_stack, stacked_maps
from tests.models.absent_gpu import ABSENT_GPU

pytestmark = pytest.mark.usefixtures("quickly_compiled")

LAYERS, LAYER = 3, 1
stack_product = jax.jit(partial(module.stack_product, interpret=True), static_argnames="transposed")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(module, "LEAST_PART", 64)


def random_arrays(rows: int, depth: int, width: int, dtype: str, seed: int = 0):
    random = np.random.default_rng(seed)
    x, w = random.normal(size=(rows, depth)), random.normal(size=(LAYERS, depth, width))
    return x.astype(jnp.dtype(dtype)), w.astype(jnp.dtype(dtype))


@pytest.mark.parametrize(
    "rows, depth, width, dtype, error",
    [
        (5, 256, 128, "bfloat16", 0.3),
        (16, 96, 48, "float32", 1e-4),
        (33, 192, 16, "bfloat16", 0.3),
        (130, 96, 256, "float32", 1e-4),
        (300, 192, 48, "bfloat16", 0.3),
    ],
)
def test_rows_are_multiplied_by_the_matrix_of_their_layer(rows, depth, width, dtype, error):
    x, w = random_arrays(rows, depth, width, dtype)
    others = w.copy()
    others[[0, 2]] = np.nan
    found = stack_product(x, others, np.int32(LAYER))
    assert found.dtype == x.dtype
    wanted = np.asarray(x, np.float64) @ np.asarray(w[LAYER], np.float64)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, 0, error)


@pytest.mark.parametrize("rows, row", [(5, 3), (130, 129)])
def test_no_row_changes_a_bit_of_another(rows, row):
    x, w = random_arrays(rows, 256, 128, "float32")
    others, _ = random_arrays(rows, 256, 128, "float32", seed=1)
    others[row] = x[row]
    before, after = (np.asarray(stack_product(each, w, np.int32(LAYER))) for each in (x, others))
    assert np.array_equal(before[row], after[row])
    assert not np.array_equal(before[2], after[2])


@pytest.mark.parametrize("rows", [5, 130])
def test_a_second_product_may_be_added_and_a_matrix_may_be_transposed(rows):
    x, w = random_arrays(rows, 256, 64, "float32")
    more, factors = random_arrays(rows, 96, 64, "float32", seed=1)
    found = stack_product(x, w.swapaxes(1, 2), np.int32(LAYER), transposed=True)
    np.testing.assert_allclose(found, x @ w[LAYER], 0, 1e-4)
    found = stack_product(x, w, np.int32(LAYER), (more, factors))
    np.testing.assert_allclose(found, x @ w[LAYER] + more @ factors[LAYER], 0, 1e-4)


@pytest.mark.parametrize("rank", [16, 8])
def test_maps_apply_to_each_row_its_own_adapter(rank):
    x, w = random_arrays(4, 64, 32, "float32")
    slots, scales = np.array([2, 0, 1, 2]), np.array([0.5, 1.5, 2.0], np.float32)
    random = np.random.default_rng(2)
    a, b = (random.normal(size=(LAYERS, 3, rank, width)).astype(np.float32) for width in (64, 32))

    @jax.jit
    def both(x, w, factors):
        adapters, layer = (jnp.array(slots), jnp.array(scales)), jnp.int32(LAYER)
        found = stacked_maps(*adapters, bank_lora(*adapters), interpret=True)(x, w, factors, layer)
        its_own = jax.tree.map(lambda leaf: leaf[LAYER], factors)
        return found, bank_lora(*adapters)(x[:, None], its_own)[:, 0]

    found, wanted = both(x, w, Lora(a, b))
    np.testing.assert_allclose(found, x @ w[LAYER] + wanted, 0, 2e-3)


@pytest.mark.parametrize(
    "shape, rows, wanted",
    [
        ((36, 4096, 1024), 384, True),
        ((36, 4096, 1024), 385, False),  # limited by arithmetic
        ((36, 4096, 1000), 128, False),  # no columns that a program can have
    ],
)
def test_the_kernel_has_few_rows_and_sizes_that_tensor_cores_have(shape, rows, wanted):
    assert reads_stack(shape, rows) == wanted


@pytest.mark.parametrize("rows", [128, 384])
def test_a_gpu_would_run_one_kernel(rows):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, 4096), (36, 4096, 1024))]
    with use_abstract_mesh(ABSENT_GPU):
        traced = jax.jit(module.stack_product).trace(*shapes, jax.ShapeDtypeStruct((), jnp.int32))
        assert traced.lower(lowering_platforms=("cuda",)).as_text().count("xla.gpu.triton") == 1
