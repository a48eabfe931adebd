"""What is computed twice changes memory, and neither losses nor gradients."""

import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.hlo.cost import cost_of
from spmd_tx.models.remat import REMAT_LEVELS
from spmd_tx.sharding.weight import abstract
from spmd_tx.worker.steps.train import make_forward_backward
from tests.support.model_shapes import TINY
from tests.support.tiny_engine import (
    LENGTH,
    ROWS,
    named_factors,
    random_adapters,
    random_datum,
    tiny_engine,
)
from tools.bench.dummy import Dummy

pytestmark = pytest.mark.usefixtures("quickly_compiled")

TOLERANCE = 2e-6  # relative to the largest entry of a factor's gradient


def rows():
    losses = ("cross_entropy", "ppo", "importance_sampling")
    return [(random_datum(seed, seed % 3, LENGTH, losses[seed % 3]),) for seed in range(ROWS)]


@pytest.mark.parametrize(
    "shape, kind, level",
    [
        pytest.param((1, 1, 1), "dense", "none", marks=pytest.mark.slow),
        pytest.param((1, 1, 1), "dense", "light", marks=pytest.mark.slow),
        ((1, 1, 1), "dense", "mlp"),
        pytest.param((2, 2, 2), "mixture", "mlp", marks=pytest.mark.slow),
    ],
)
def test_every_level_leads_to_the_same_gradients(shape, kind, level):
    engine = tiny_engine(shape, kind=kind, remat=level)
    w = random_adapters(1, engine.model)
    expected = tiny_engine(shape, kind=kind).forward_backward(w, rows())
    actual = engine.forward_backward(w, rows())
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    factors = named_factors(actual.grad_sum)
    for name, leaf in named_factors(expected.grad_sum).items():
        np.testing.assert_allclose(factors[name], leaf, rtol=0, atol=TOLERANCE * np.abs(leaf).max())


@pytest.mark.slow
def test_a_higher_level_keeps_less():
    needed = {level: tiny_engine(remat=level).temporary_bytes(rows()) for level in REMAT_LEVELS}
    assert needed["none"] > max(needed["light"], needed["mlp"]) > needed["full"]


@pytest.mark.slow
def test_experts_that_share_their_outer_factors_run_once_even_where_most_is_recomputed():
    """The backward pass reads nothing of their results but what the shared factor takes."""
    summed = {}
    for level in ("light", "full"):
        text = tiny_engine((1, 2, 1), kind="mixture", remat=level).compiled(rows()).as_text()
        found = (each for each in cost_of(text).collectives if each.source.endswith("reduce_scatter"))
        summed[level] = sum(each.times for each in found if each.collective and each.collective.size == 2)
    assert summed["full"] == summed["light"] > 0


def test_what_is_kept_of_all_layers_has_no_copy_of_their_matrices():
    dummy = Dummy(TINY, rank=4, slots=2, dtype=jnp.bfloat16)
    train = dummy.declared_train
    trees = dummy.declared_base, train.w, train.grad_sum, train.scale
    step = make_forward_backward(TINY, dummy.mesh, dummy.declared_base, train, "none")
    state = (abstract(dummy.mesh, tree) for tree in trees)
    (program,) = (x.params["jaxpr"] for x in step.trace(*state, *dummy.batch(2, 32, 2)).jaxpr.eqns)
    loops = [x for x in program.eqns if x.primitive.name == "scan" and x.params["length"] == TINY.n_layers]
    kept = {x.aval.shape for loop in loops for x in loop.outvars}
    stacked = {dummy.declared_base.layers[name].shape for name in ("q", "gate", "down")}
    assert len(loops) == 2
    assert kept
    assert not kept & stacked
