"""The grouped product by every implementation; kernels run as plain programs."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_tx.models.checkpoint.packed import decoded
from spmd_tx.models.declared.encoding import Fp8Blocks, Int4Groups, Mxfp4
from spmd_tx.models.experts import kernels, product
from spmd_tx.models.experts.product import IMPLEMENTATIONS, grouped_product, unset
from spmd_tx.protocol.kernels import PALLAS, Kernels, products_of
from spmd_tx.sharding.mesh import AXES
from spmd_tx.worker.self_tests.products import random_packed
from tests.models.absent_gpu import ABSENT_GPU
from tests.support.kernels import kernels_of

pytestmark = pytest.mark.usefixtures("quickly_compiled")

TILE, TILES, WIDTH_IN, WIDTH_OUT, EXPERTS = 16, 6, 128, 256, 5
EXPERT_OF_TILE = [3, 0, 0, 4, 1, 3]
TURNED = [1, 4, 4, 0, 3, 1]  # the same where experts stand in the reverse order


def random_arrays(seed: int, dtype: str, transposed: bool):
    random = np.random.default_rng(seed)
    x = random.normal(size=(TILE * TILES, WIDTH_OUT if transposed else WIDTH_IN))
    w = random.normal(size=(EXPERTS, WIDTH_IN, WIDTH_OUT))
    return x.astype(jnp.dtype(dtype)), w.astype(jnp.dtype(dtype))


@partial(jax.jit, static_argnames=("name", "transposed"))
def compiled(name: str, x, w, experts, transposed: bool):
    return grouped_product(kernels_of(name), x, w, experts, transposed)


def multiplied(name: str, x, w, transposed: bool = False, experts=EXPERT_OF_TILE):
    return compiled(name, x, w, np.asarray(experts, np.int32), transposed)


def expected(x, w, transposed: bool) -> np.ndarray:
    w = np.asarray(w, np.float64)[EXPERT_OF_TILE]
    w = w.swapaxes(1, 2) if transposed else w
    tiles = np.asarray(x, np.float64).reshape(TILES, TILE, -1)
    return np.einsum("MJI,MIO->MJO", tiles, w).reshape(TILE * TILES, -1)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("dtype, error", [("float32", 1e-4), ("bfloat16", 0.3)])
def test_each_tile_is_multiplied_by_its_experts_matrix(name, dtype, error, transposed):
    x, w = random_arrays(0, dtype, transposed)
    actual = multiplied(name, x, w, transposed)
    assert actual.dtype == x.dtype
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected(x, w, transposed), 0, error)


@cache
def packed_and_plain(encoding):
    packed = random_packed(np.random.default_rng(1), encoding, EXPERTS, WIDTH_IN, WIDTH_OUT)
    plain = jax.jit(lambda packed: decoded(packed, jnp.float32))(packed)
    return jax.tree.map(np.asarray, (packed, plain))


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("encoding", [Mxfp4(), Int4Groups(), Fp8Blocks(64, 64)], ids=lambda each: type(each))
@pytest.mark.parametrize("name", product.READS_PACKED)
def test_packed_matrices_are_decoded_where_they_are_multiplied(name, encoding, transposed):
    packed, plain = packed_and_plain(encoding)
    x, _ = random_arrays(0, "float32", transposed)
    found = multiplied(name, x, packed, transposed)
    np.testing.assert_allclose(found, expected(x, plain, transposed), 0, 1e-4)
    again = multiplied(name, x, jax.tree.map(lambda each: each[::-1], packed), transposed, TURNED)
    assert np.array_equal(found, again)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_gradient_of_the_rows_is_the_transposed_product(name):
    x, w = random_arrays(1, "float32", transposed=False)
    slope, _ = random_arrays(2, "float32", transposed=True)
    gradient = jax.jit(lambda x, slope: jax.vjp(lambda x: multiplied(name, x, w), x)[1](slope)[0])
    np.testing.assert_allclose(gradient(x, slope), expected(slope, w, True), 0, 1e-4)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_matrices_of_all_layers_are_read_where_they_are_stacked(name):
    x, w = random_arrays(6, "float32", transposed=False)
    stack = np.stack([np.full_like(w, np.nan), w])
    found = multiplied(name, x, stack, experts=np.array(EXPERT_OF_TILE) + EXPERTS)
    assert np.array_equal(found, multiplied(name, x, w))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neither_the_place_nor_the_company_of_a_row_changes_a_bit(name, dtype, transposed):
    x, w = random_arrays(3, dtype, transposed)
    before = np.asarray(multiplied(name, x, w, transposed))
    random = np.random.default_rng(4)
    for _ in range(3):
        tiles, rows = random.permutation(TILES), random.permutation(TILE)
        others = np.array(random_arrays(5, dtype, transposed)[0]).reshape(TILES, TILE, -1)
        moved = np.asarray(x).reshape(TILES, TILE, -1)[tiles][:, rows]
        moved[:, TILE // 2 :] = others[:, TILE // 2 :]
        after = multiplied(name, moved.reshape(x.shape), w, transposed, np.array(EXPERT_OF_TILE)[tiles])
        kept = np.asarray(after).reshape(TILES, TILE, -1)[:, : TILE // 2]
        wanted = before.reshape(TILES, TILE, -1)[tiles][:, rows][:, : TILE // 2]
        assert np.array_equal(kept, wanted)


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_every_platform_has_an_implementation(platform):
    assert Kernels(platform).products in IMPLEMENTATIONS
    assert (PALLAS.get(platform) in IMPLEMENTATIONS) == (platform != "cpu")
    assert set(products_of(platform)) <= IMPLEMENTATIONS.keys()


@pytest.mark.parametrize(
    "capability, fastest", [((9, 0), "mosaic_gpu"), ((8, 0), "triton"), (None, "mosaic_gpu")]
)
def test_gpus_before_hopper_have_no_mosaic_gpu(capability, fastest):
    assert products_of("gpu", capability)[0] == fastest
    assert products_of("gpu", capability)[-1] == "reference"


@pytest.mark.parametrize("name, call", [("mosaic_gpu", "mosaic_gpu_v2"), ("triton", "xla.gpu.triton")])
def test_results_that_no_gpu_writes_depend_on_what_they_are_for(name, call):
    kernels = Kernels("gpu", products=name)
    run = jax.shard_map(
        lambda like: unset(kernels, (64, 8), like), mesh=ABSENT_GPU, in_specs=P(AXES), out_specs=P(AXES)
    )
    traced = jax.jit(run).trace(jax.ShapeDtypeStruct((4, 8), jnp.bfloat16))
    calls = re.findall(
        rf'{re.escape(call)}"?\((%\w+)\)', traced.lower(lowering_platforms=("cuda",)).as_text()
    )
    assert len(calls) == 1


def test_sums_of_choices_are_taken_in_order_and_nothing_else_is_read():
    random = np.random.default_rng(8)
    y = random.normal(size=(40, 64 + 32 + 8))
    y[[0, 7]] = np.nan  # nobody names them
    place = random.permutation(np.setdiff1d(np.arange(40), [0, 7]))[:33].reshape(11, 3)
    place[random.random(place.shape) < 0.5] = -1
    place[4] = -1
    y, place = y.astype(jnp.bfloat16), place.astype(np.int32)
    found = jax.jit(lambda y, place: kernels.triton_sum(y, place, 16, interpret=True))(y, place)
    total = np.zeros((11, y.shape[1]), np.float32)
    for choice in range(3):
        total += np.where(place[:, choice, None] >= 0, y[place[:, choice]].astype(np.float32), np.float32(0))
    assert np.array_equal(np.asarray(found, np.float32), total.astype(jnp.bfloat16).astype(np.float32))
    assert not np.any(np.asarray(found, np.float32)[4])
