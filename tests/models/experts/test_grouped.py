"""Experts of grouped pairs, with their gradients, in chunks of many tiles as accelerators run them."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models.adapters.lora import Lora
from spmd_tx.models.checkpoint.packed import decoded
from spmd_tx.models.declared.encoding import Mxfp4
from spmd_tx.models.experts import grouped, layout
from spmd_tx.models.experts.factor_sums import reads_in_place
from spmd_tx.models.experts.factors import expert_factors
from spmd_tx.models.experts.grouped import Grouping, run_experts
from spmd_tx.models.experts.layout import Choices, Tiling
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.worker.self_tests.products import random_packed
from tests.support.kernels import kernels_of

pytestmark = pytest.mark.usefixtures("quickly_compiled")

ROWS, LENGTH, CHOICES, EXPERTS, SLOTS, RANK, WIDTH, INNER = 4, 64, 2, 8, 3, 4, 64, 32
NAMES = {"gate": (WIDTH, INNER), "up": (WIDTH, INNER), "down": (INNER, WIDTH)}
SCALES = np.float32([0.5, 2.0, 1.0])


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setattr(layout, "LEAST_CHUNK", 64)


def normal(seed: int, *shape: int):
    return np.random.default_rng(seed).normal(0, 0.3, shape).astype(np.float32)


@cache
def parameters():
    matrices = {name: normal(i, EXPERTS, *widths) for i, (name, widths) in enumerate(NAMES.items())}
    lora = {
        name: Lora(
            a=normal(10 + i, EXPERTS, SLOTS, RANK, widths[0]),
            b=normal(20 + i, EXPERTS, SLOTS, RANK, widths[1]),
        )
        for i, (name, widths) in enumerate(NAMES.items())
    }
    return matrices, lora


def random_rows(seed: int, rows: int = ROWS, length: int = LENGTH):
    """(hidden states, experts of each token in ascending order, their weights, slopes of the results)"""
    chosen = np.argsort(np.random.default_rng(seed).random((rows, length, EXPERTS)), axis=-1)[..., :CHOICES]
    chosen = np.sort(chosen, axis=-1).astype(np.int32)
    h, slope = normal(seed + 1, rows, length, WIDTH), normal(seed + 2, rows, length, WIDTH)
    return h, chosen, 1 / (1 + np.exp(-normal(seed + 3, rows, length, CHOICES))), slope


@cache
def both_passes(product: str, tiling: Tiling):
    """The experts forward and backward, compiled once for each shape."""
    assert tiling.positions > tiling.chunk, "several chunks"
    how = Grouping(tiling, kernels_of(product), WIDTH, WIDTH)

    @jax.jit
    @jax.shard_map(mesh=make_mesh(1, 1, 1), in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    def both(matrices, lora, h, chosen, weights, slope, slots):
        place = layout.layout(tiling, chosen, slots, EXPERTS, SLOTS)
        y, pull_back = jax.vjp(
            lambda lora, h, weights: run_experts(how, matrices, lora, h, weights, jnp.array(SCALES), place),
            lora,
            h,
            weights,
        )
        return y, pull_back(slope)

    return both


def run(product: str, rows, slots, lora=None, matrices=None):
    """(results, (gradients of factors, hidden states and weights))"""
    usual_matrices, usual = parameters()
    tiling = Choices(*rows[1].shape, EXPERTS, EXPERTS).tiling(by_tile=product == "reference")
    both = both_passes(product, tiling)
    slots = np.asarray(slots, np.int32)
    return jax.tree.map(np.asarray, both(matrices or usual_matrices, lora or usual, *rows, slots))


def expected(rows, slots, lora=None):
    """The same by plain formulas over all experts."""
    matrices, usual = parameters()
    total, gradient = plain_formulas(matrices, lora or usual, *rows, np.asarray(slots, np.int32))
    return jax.tree.map(np.asarray, (total, gradient))


@jax.jit
def plain_formulas(matrices, lora, h, chosen, weights, slope, slots):
    def loss(lora, h, weights):
        total = plain_results(jnp, matrices, lora, h, chosen, weights, slots)
        return jnp.sum(total * slope), total

    gradient, total = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(lora, h, weights)
    return total, gradient


def plain_results(xp, matrices, lora, h, chosen, weights, slots):
    """With NumPy or JAX as ``xp``."""
    scales = xp.asarray(SCALES)[slots][:, None, None]

    def linear(x, name, expert):
        a, b = (leaf[expert][slots] for leaf in (lora[name].a, lora[name].b))
        low = xp.einsum("rti,rqi->rtq", x, a) * scales
        return x @ matrices[name][expert] + xp.einsum("rtq,rqo->rto", low, b)

    total = xp.zeros_like(h)
    for expert in range(EXPERTS):
        weight = xp.sum(xp.where(chosen == expert, weights, 0.0), axis=-1, keepdims=True)
        gate = linear(h, "gate", expert)
        hidden = gate / (1 + xp.exp(-gate)) * linear(h, "up", expert)
        total += weight * linear(hidden, "down", expert)
    return total


@pytest.mark.parametrize("product", ["reference", "mosaic", "triton"])
def test_results_and_gradients_are_those_of_plain_formulas(product):
    rows, slots = random_rows(1), [2, 0, 1, 2]
    actual, wanted = run(product, rows, slots), expected(rows, slots)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-4)


def test_room_for_slopes_is_made_when_a_layers_slopes_are_there(monkeypatch):
    """XLA would make that of several layers at once."""
    likes = []

    def unset(_, shape, like):
        likes.append(like)
        return jnp.zeros(shape, like.dtype)

    monkeypatch.setattr(grouped, "unset", unset)
    (matrices, lora), (h, chosen, weights, slope) = jax.tree.map(jnp.asarray, (parameters(), random_rows(1)))
    tiling = Choices(*chosen.shape, EXPERTS, EXPERTS).tiling(by_tile=False)

    @jax.shard_map(mesh=make_mesh(1, 1, 1), in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    def backward(h, slope):
        place = layout.layout(tiling, chosen, jnp.array([2, 0, 1, 2]), EXPERTS, SLOTS)
        how = Grouping(tiling, kernels_of("triton"), WIDTH, WIDTH)
        slopes = grouped._backward(how, (matrices, lora, h, weights, jnp.array(SCALES), place), slope)[2]
        assert [like is slope for like in likes] == [True]
        return slopes

    assert jax.eval_shape(backward, h, slope).shape == h.shape


@pytest.mark.parametrize("product", ["reference", pytest.param("mosaic", marks=pytest.mark.slow)])
def test_packed_matrices_give_the_bits_of_decoded_ones(product):
    """Without a kernel that reads them, they are decoded once for all chunks."""
    rows, slots = random_rows(1), [2, 0, 1, 2]
    random = np.random.default_rng(1)
    packed = {name: random_packed(random, Mxfp4(), EXPERTS, *widths) for name, widths in NAMES.items()}
    plain = {name: decoded(matrix, jnp.float32) for name, matrix in packed.items()}
    found, wanted = (run(product, rows, slots, matrices=each) for each in (packed, plain))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.any(one)
        assert np.array_equal(one, other)


def decode(rows, slots, lora=None, *, in_place: bool, put_in: int = 0):
    """The results of rows of one token. ``put_in`` columns stand behind the others."""
    matrices, usual = parameters()
    h, chosen, weights, _ = rows
    results = decoder(Choices(*chosen.shape, EXPERTS, EXPERTS).tiling(by_tile=False), in_place, put_in)
    slots = np.asarray(slots, np.int32)
    return np.asarray(results(matrices, lora or usual, h, chosen, weights, slots))


@cache
def decoder(tiling: Tiling, in_place: bool, put_in: int):
    assert tiling.block == 1
    how = Grouping(tiling, kernels_of("mosaic"), WIDTH, WIDTH + put_in, in_place=in_place)

    @jax.jit
    @jax.shard_map(mesh=make_mesh(1, 1, 1), in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    def results(matrices, lora, h, chosen, weights, slots):
        place = layout.layout(tiling, chosen, slots, EXPERTS, SLOTS)
        return run_experts(how, matrices, lora, h, weights, jnp.array(SCALES), place)

    return results


def test_factors_read_in_place_give_the_same():
    slots = np.arange(ROWS * LENGTH) // 5 % SLOTS
    rows = tuple(x.reshape(ROWS * LENGTH, 1, -1) for x in random_rows(21))
    found = decode(rows, slots, in_place=True)
    wanted = plain_results(np, *parameters(), *rows[:3], slots)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-4)
    np.testing.assert_allclose(found, decode(rows, slots, in_place=False), rtol=0, atol=1e-5)
    # Of an adapter that no row has, nothing arrives.
    large = with_slot(1, lambda factors: factors * 1e6)
    without = np.where(slots == 1, 0, slots)
    found = decode(rows, without, in_place=True)
    assert np.array_equal(found, decode(rows, without, large, in_place=True))


def with_slot(slot, change, lora=None):
    """The factors with those of a slot changed."""

    def changed(leaf):
        leaf = leaf.copy()
        leaf[:, slot] = change(leaf[:, slot])
        return leaf

    return jax.tree.map(changed, lora or parameters()[1])


def moved(rows, order):
    return tuple(x[order] for x in rows)


@pytest.mark.parametrize("product", ["reference", "mosaic", "triton"])
def test_neither_company_nor_place_changes_a_bit(product):
    """Our two rows of slot 1 beside others, in other places, and beside a broken adapter in slot 0."""
    ours, others, free = random_rows(1, 2), random_rows(50, 2), random_rows(90, 2)
    alone = tuple(np.concatenate(pair) for pair in zip(ours, free, strict=True))
    alone[3][2:] = 0
    together = tuple(np.concatenate(pair) for pair in zip(ours, others, strict=True))
    broken = with_slot(0, lambda factors: np.nan * factors)
    y, (lora, h, weights) = run(product, alone, [1, 1, 2, 2])
    for order, slots, factors in (
        ([0, 1, 2, 3], [1, 1, 0, 2], None),
        ([2, 0, 3, 1], [2, 1, 0, 1], None),
        ([2, 3, 0, 1], [0, 0, 1, 1], broken),
    ):
        result = run(product, moved(together, order), slots, factors)
        its_y, (its_lora, its_h, its_weights) = result
        places = [order.index(0), order.index(1)]
        for mine, beside in ((y, its_y), (h, its_h), (weights, its_weights)):
            assert np.array_equal(mine[:2], beside[places])
        for mine, beside in zip(jax.tree.leaves(lora), jax.tree.leaves(its_lora), strict=True):
            assert np.any(mine[:, 1])
            assert np.array_equal(mine[:, 1], beside[:, 1])


def of_rank(rank: int):
    """Factors of a rank that tensor cores have."""
    return {
        name: Lora(
            a=normal(30 + i, EXPERTS, SLOTS, rank, widths[0]),
            b=normal(40 + i, EXPERTS, SLOTS, rank, widths[1]),
        )
        for i, (name, widths) in enumerate(NAMES.items())
    }


@pytest.mark.slow
def test_blocks_that_fill_tensor_cores_read_the_factors_of_their_groups_in_place(monkeypatch):
    rows, slots, lora = random_rows(61, 2, length=256), [2, 0], of_rank(16)
    told: list[bool] = []

    def reads(*arguments):
        told.append(reads_in_place(*arguments))
        return told[-1]

    monkeypatch.setattr(grouped, "reads_in_place", reads)
    found, wanted = run("triton", rows, slots, lora), expected(rows, slots, lora)
    assert any(told)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-3)
    # Beside another row, in another place and beside a broken adapter the bits are the same.
    turned = tuple(np.concatenate([random_rows(70, 1, length=256)[i], x[:1]]) for i, x in enumerate(rows))
    broken = with_slot(1, lambda factors: np.nan * factors, lora)
    beside = run("triton", turned, [1, 2], broken)
    (y, (its, h, weights)), (other_y, (others, other_h, other_weights)) = found, beside
    for mine, other in ((y, other_y), (h, other_h), (weights, other_weights)):
        assert np.any(mine[0])
        assert np.array_equal(mine[0], other[1])
    for mine, other in zip(jax.tree.leaves(its), jax.tree.leaves(others), strict=True):
        assert np.array_equal(mine[:, 2], other[:, 2])


@pytest.mark.parametrize("product", ["reference", "mosaic"])
def test_no_token_is_dropped_if_all_choose_the_same_experts(product):
    h, chosen, weights, slope = random_rows(7)
    rows, slots = (h, np.broadcast_to(np.int32([2, 5]), chosen.shape), weights, slope), [0, 1, 2, 1]
    for one, other in zip(
        jax.tree.leaves(run(product, rows, slots)), jax.tree.leaves(expected(rows, slots)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-4)


OUTER = (("gate", "a"), ("up", "a"), ("down", "b"))  # factors that touch the model width


def with_shared_outer(lora, whole):
    """The factors, the outer ones being those of expert 0: repeated, or if not ``whole`` only once."""
    shared = {name: getattr(lora[name], factor)[0] for name, factor in OUTER}
    if whole:
        shared = {name: np.broadcast_to(x, (EXPERTS, *x.shape)) for name, x in shared.items()}
    return lora | {name: lora[name].replace(**{factor: shared[name]}) for name, factor in OUTER}


def test_shared_outer_factors_leave_the_others_to_be_read_in_place():
    slots = np.arange(ROWS * LENGTH) // 5 % SLOTS
    h, *others = (x.reshape(ROWS * LENGTH, 1, -1) for x in random_rows(31))
    lora = with_shared_outer(parameters()[1], whole=False)
    low = [np.einsum("rti,rqi->rtq", h, lora[name].a[slots]) for name in ("gate", "up")]
    rows = (np.concatenate([h, *low], axis=-1), *others)
    one, other = (
        decode(rows, slots, expert_factors(lora), in_place=each, put_in=RANK) for each in (True, False)
    )
    assert np.all(np.any(one[..., :WIDTH], axis=(1, 2)))
    assert np.all(np.any(one[..., WIDTH:], axis=(1, 2)))
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("product", ["reference", pytest.param("mosaic", marks=pytest.mark.slow)])
def test_shared_outer_factors_are_as_if_every_expert_had_them(product):
    rows, slots = random_rows(11), jnp.array([2, 0, 1, 2])
    matrices, usual = parameters()
    h, chosen, weights, slope = rows
    scales = jnp.array(SCALES)
    tiling = Choices(*chosen.shape, EXPERTS, EXPERTS).tiling(by_tile=product == "reference")
    put_in = 0 if product == "reference" else 12  # columns behind the others
    how = Grouping(tiling, kernels_of(product), WIDTH, WIDTH + RANK + put_in)

    def low(x, a):
        return jnp.einsum("rti,rqi->rtq", x, a[slots]) * scales[slots][:, None, None]

    @jax.jit
    @jax.shard_map(mesh=make_mesh(1, 1, 1), in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    def shared(lora, h, weights):
        def loss(lora, h, weights):
            place = layout.layout(tiling, jnp.array(chosen), slots, EXPERTS, SLOTS)
            its = jax.tree.map(jnp.array, matrices)
            wide = jnp.concatenate([h, low(h, lora["gate"].a), low(h, lora["up"].a)], axis=-1)
            wide = jnp.pad(wide, ((0, 0), (0, 0), (0, put_in)))
            y = run_experts(how, its, expert_factors(lora), wide, weights, scales, place)
            y, low_down = y[..., :WIDTH], y[..., WIDTH : WIDTH + RANK]
            total = y + jnp.einsum("rtq,rqo->rto", low_down, lora["down"].b[slots])
            return jnp.sum(total * slope), total

        return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(lora, h, weights)

    gradient, y = shared(with_shared_outer(usual, whole=False), h, weights)
    wanted_y, (wanted_lora, *wanted) = expected(rows, slots, with_shared_outer(usual, whole=True))
    for name, factor in OUTER:
        total = getattr(wanted_lora[name], factor).sum(axis=0)
        wanted_lora[name] = wanted_lora[name].replace(**{factor: total})
    for one, other in zip(
        jax.tree.leaves((y, *gradient)), jax.tree.leaves((wanted_y, wanted_lora, *wanted)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-4)
