"""Routers choose and weigh experts as those of transformers do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models.declared.route import Route
from spmd_tx.models.experts.routing import route
from tests.golden.parts import PARTS, ROUTED_EXPERTS, ROUTES

pytestmark = pytest.mark.usefixtures("quickly_compiled")

GOLDEN = np.load(PARTS)
DECLARED = {
    "groups": Route("sigmoid", groups=4, kept_groups=2, factor=2.5),
    "not_normalised": Route("sigmoid", normalise=False, groups=8, kept_groups=3, factor=1.5),
    "one_group": Route("sigmoid", factor=1.8),
    "gpt_oss": Route("softmax", chosen_first=True),
}


routed = jax.jit(route, static_argnums=(0, 1))


def run(name, replayed=None):
    case = ROUTES[name]
    weights, chosen = case.weights, case.config["num_experts_per_tok"]
    return routed(
        DECLARED[name],
        chosen,
        weights["weight"].T,
        case.inputs[None],
        replayed,
        weights.get("bias"),
        weights.get("e_score_correction_bias"),
    )


@pytest.mark.parametrize("name", ROUTES)
def test_choices_and_weights_are_those_of_transformers(name):
    choices, gates = run(name)
    assert np.array_equal(np.sort(choices[0], axis=1), GOLDEN[f"route/{name}/choices"])
    np.testing.assert_allclose(gates[0], GOLDEN[f"route/{name}/gates"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ROUTES)
def test_replayed_choices_are_kept_and_weighed_by_the_router(name):
    nothing = np.full((1, len(ROUTES[name].inputs), ROUTES[name].config["num_experts_per_tok"]), -1, np.int32)
    own, gates = map(np.asarray, run(name, nothing))
    replayed = np.array(own)
    replayed[0, 3] = [1, 7, 9, 15][: replayed.shape[2]]
    replayed[0, 4:] = -1
    choices, weights = map(np.asarray, run(name, replayed))
    assert np.array_equal(choices[0, :4], replayed[0, :4])
    assert np.array_equal(choices[0, 4:], own[0, 4:])
    assert np.array_equal(np.flatnonzero(weights[0, 3]), replayed[0, 3])
    kept = np.delete(np.arange(choices.shape[1]), 3)
    assert np.array_equal(weights[0, kept], gates[0, kept])


def test_a_correction_decides_the_choice_but_not_the_weights_gradient():
    case = ROUTES["one_group"]
    router, h = jnp.asarray(case.weights["weight"].T), jnp.asarray(case.inputs[None])
    favoured = np.where(np.arange(ROUTED_EXPERTS) == 5, np.float32(10), np.float32(0))

    def weight(correction):
        return jnp.sum(route(Route("sigmoid"), 1, router, h, None, None, correction)[1])

    choices, gates = map(np.asarray, routed(Route("sigmoid"), 2, router, h, None, None, favoured))
    assert np.all(np.any(choices == 5, axis=2))
    assert np.all(gates < 1)
    assert not np.any(jax.jit(jax.grad(weight))(favoured))


def test_the_best_groups_are_those_with_the_best_pairs():
    """One very good expert among bad ones loses against two good ones, but not where one decides."""
    h, router = np.ones((1, 1, 1), np.float32), np.float32([[3.0, -9.0, 2.0, 2.0]])
    two = routed(Route("sigmoid", groups=2, kept_groups=1, best_of_group=2), 2, router, h, None)[0]
    one = routed(Route("sigmoid", groups=2, kept_groups=1, best_of_group=1), 2, router, h, None)[0]
    assert np.array_equal(np.sort(two[0, 0]), [2, 3])
    assert np.array_equal(np.sort(one[0, 0]), [0, 1])


@pytest.mark.parametrize(
    "declared, experts, chosen, reason",
    [
        (Route(groups=3, kept_groups=1), 16, 2, "equally large"),
        (Route(groups=4, kept_groups=5), 16, 2, "keeps 5 of 4"),
        (Route(groups=4, kept_groups=1), 16, 5, "hold fewer"),
        (Route(groups=4, kept_groups=2), 16, 8, None),
    ],
)
def test_numbers_that_cannot_be_are_named(declared, experts, chosen, reason):
    problem = declared.problem(experts, chosen)
    assert problem is None if reason is None else reason in (problem or "")
