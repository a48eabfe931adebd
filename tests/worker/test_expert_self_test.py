import jax.numpy as jnp
import pytest

from spmd_tx.models.experts import product
from spmd_tx.worker import expert_self_test
from spmd_tx.worker.expert_self_test import ExpertSizes, problem_of_product

SIZES = ExpertSizes(experts=3, width=16, inner=8)
right = product.IMPLEMENTATIONS["reference"]


def takes_the_first_expert(x, w, experts, transposed, of_layer):
    return right(x, w, jnp.zeros_like(experts), transposed, of_layer)


def forgets_to_transpose(x, w, experts, transposed, of_layer):
    return right(x, w.swapaxes(1, 2).reshape(w.shape) if transposed else w, experts, transposed, of_layer)


def adds_what_stands_beside(x, w, experts, transposed, of_layer):
    beside = 1 + 0.01 * jnp.sign(jnp.roll(x, 1, 0)[:, :1]).astype(x.dtype)
    return right(x, w, experts, transposed, of_layer) * beside


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(expert_self_test, "TILE", 8)


def test_the_reference_passes():
    assert problem_of_product("reference", SIZES) is None


@pytest.mark.parametrize(
    "wrong, problem",
    [
        (takes_the_first_expert, "the product is off by"),
        (forgets_to_transpose, "the transposed product is off by"),
        (adds_what_stands_beside, "the product of a row depends on its place, or on other rows"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_wrong_is_noticed(wrong, problem, monkeypatch):
    monkeypatch.setitem(product.IMPLEMENTATIONS, "reference", wrong)
    assert str(problem_of_product("reference", SIZES)).startswith(problem)
