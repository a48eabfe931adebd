"""Which experts were used is reported, and what was reported can be used again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models.adapters import row_sums
from spmd_tx.models.experts import factor_sums, grouped, moe, product
from spmd_tx.protocol.kernels import Kernels
from tests.models import reference
from tests.support.tiny_engine import (
    BOTH_SCALES,
    LENGTH,
    MIXTURE,
    ROWS,
    Datum,
    TinyEngine,
    mesh_name,
    named_factors,
    random_datum,
    slot_of,
    tiny_engine,
)
from tests.support.tiny_sampler import Sample, go_on, random_prompt, sampler_weights, stand, tiny_sampler

pytestmark = pytest.mark.usefixtures("quickly_compiled")

TOLERANCE = 1e-5
SAMPLE = Sample(random_prompt(1, 13), slot=1, seed=(7, 9))
SHAPE = (ROWS, LENGTH, MIXTURE.n_layers, MIXTURE.experts_per_token)
MESHES = [*(pytest.param(mesh, marks=pytest.mark.slow) for mesh in [(1, 1, 1), (1, 4, 2)]), (2, 2, 2)]


@pytest.fixture(scope="module", params=MESHES, ids=mesh_name)
def sampler(request):
    """Its base weights are split, as those of other tests' mixtures are."""
    return tiny_sampler(request.param, kind="mixture", split_base=request.param[0] > 1).reset()


def sampled(sampler, sample=SAMPLE):
    """(prompt and drawn tokens, the experts of all of them but the last)"""
    places = stand([sample], shards=sampler.data_shards)
    ((_, of_prompt),) = sampler.prefill_all(places)
    drawn = (sampler.decode(places)[0] + sampler.decode(go_on(places))[0]).living()
    return np.append(sample.prompt, drawn.tokens), np.concatenate([of_prompt, drawn.experts])


def rows_of(tokens: np.ndarray, slot: int = SAMPLE.slot):
    ones = np.ones(len(tokens) - 1, np.float32)
    return [()] * (ROWS - 1) + [(Datum(slot, tokens[:-1], tokens[1:], ones, ones, ones),)]


def replay(experts: np.ndarray) -> np.ndarray:
    """The experts for the last row of a batch."""
    whole = np.full(SHAPE, -1, np.int16)
    whole[-1, : len(experts)] = experts
    return whole


def test_every_token_reports_different_experts_that_exist(sampler):
    tokens, experts = sampled(sampler)
    assert experts.shape == (len(tokens) - 1, MIXTURE.n_layers, MIXTURE.experts_per_token)
    assert experts.dtype == np.uint8
    assert experts.max() < MIXTURE.n_experts
    assert np.all(experts[..., 0] != experts[..., 1])
    assert len(np.unique(experts)) == MIXTURE.n_experts


def test_decode_and_prefill_report_the_same_experts_on_every_mesh(sampler):
    tokens, experts = sampled(sampler)
    assert np.array_equal(experts, sampled(tiny_sampler(kind="mixture").reset())[1])
    again = stand([Sample(tokens, slot=SAMPLE.slot)], shards=sampler.data_shards)
    ((_, prefilled),) = sampler.prefill_all(again)
    assert np.array_equal(np.sort(prefilled), np.sort(experts))


def test_replaying_what_the_router_chooses_anyway_changes_no_bit(sampler):
    tokens, experts = sampled(sampler)
    engine, w, rows = sampler.engine, sampler_weights(MIXTURE), rows_of(tokens)
    free = engine.forward_backward(w, rows)
    for some in (experts, np.where(np.arange(len(experts))[:, None, None] % 3, experts.astype(np.int16), -1)):
        replayed = engine.forward_backward(w, rows, experts=replay(some))
        assert np.array_equal(replayed.logprobs, free.logprobs)
        for name, factor in named_factors(replayed.grad_sum).items():
            assert np.array_equal(factor, named_factors(free.grad_sum)[name]), name


@pytest.mark.slow
def test_other_experts_are_used_with_their_own_probabilities(sampler, monkeypatch):
    tokens, experts = sampled(sampler)
    others = (experts + 1) % MIXTURE.n_experts
    w, base = sampler_weights(MIXTURE), tiny_engine(kind="mixture").base
    forced = iter(np.moveaxis(others, 1, 0))

    def choose(model, probabilities):
        return np.any(next(forced)[..., None] == np.arange(model.n_experts), axis=-2)

    monkeypatch.setattr(reference, "chosen", choose)
    expected = reference.logprobs(
        MIXTURE, base, slot_of(w, SAMPLE.slot), BOTH_SCALES[SAMPLE.slot], tokens[:-1], tokens[1:]
    )
    actual, _ = sampler.engine.forward(w, rows_of(tokens), replay(others))
    actual = actual[-1, : len(tokens) - 1]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)
    free, _ = sampler.engine.forward(w, rows_of(tokens))
    assert np.abs(actual - free[-1, : len(actual)]).max() > 1e-3


@pytest.mark.slow
def test_what_company_replays_changes_no_bit():
    engine, w = tiny_engine(kind="mixture"), sampler_weights(MIXTURE)
    ours, others = (random_datum(1, 1),), (random_datum(2, 2),)
    random = np.random.default_rng(0).permuted(np.tile(np.arange(8), (*SHAPE[:3], 1)), axis=-1)[..., :2]
    alone = engine.forward_backward(w, [ours])
    experts = np.full(SHAPE, -1, np.int16)
    experts[1] = random[1]
    beside = engine.forward_backward(w, [ours, others], experts=experts)
    assert np.array_equal(beside.logprobs[0], alone.logprobs[0])
    mine, wanted = (named_factors(slot_of(one.grad_sum, 1)) for one in (beside, alone))
    assert all(np.array_equal(mine[name], wanted[name]) for name in wanted)
    assert jax.tree.all(jax.tree.map(lambda leaf: np.isfinite(leaf).all(), beside.grad_sum))


def sum_of_pairs(y_WD, place_TC, *_):
    """As the kernel of experts.kernels adds them."""
    y_TCD = jnp.where((place_TC >= 0)[..., None], y_WD[jnp.maximum(place_TC, 0)], 0)
    return y_TCD.sum(1, dtype=jnp.float32).astype(y_WD.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 4, 2), (2, 2, 1)], ids=mesh_name)
def test_kernels_read_matrices_where_all_layers_stack_them(mesh, monkeypatch):
    """Gradients are those of experts that run over all rows."""
    kernels = Kernels("gpu", products="triton")
    # Pallas cannot interpret kernels in this place.
    for table in (product.IMPLEMENTATIONS, product.UNSET, row_sums.IMPLEMENTATIONS):
        monkeypatch.setitem(table, "triton", table["reference"])
    monkeypatch.setattr(factor_sums, "_triton", lambda _, *arrays: factor_sums._xla(*arrays))
    monkeypatch.setattr(grouped, "triton_sum", sum_of_pairs)
    monkeypatch.setattr(moe, "LEAST_GROUPED", 0)
    w, rows = sampler_weights(MIXTURE), [(random_datum(1, 1),), (random_datum(2, 2),)]
    engine = TinyEngine(mesh, np.float32, "mixture", split_base=False, remat="full", kernels=kernels)
    with_stacks = engine.forward_backward(w, rows)
    expected = tiny_engine(kind="mixture").forward_backward(w, rows)
    np.testing.assert_allclose(with_stacks.logprobs, expected.logprobs, rtol=0, atol=TOLERANCE)
    found = named_factors(with_stacks.grad_sum)
    for name, factor in named_factors(expected.grad_sum).items():
        np.testing.assert_allclose(found[name], factor, rtol=0, atol=2e-4, err_msg=name)
