"""Tests fail where an array has not the shape that its annotation says."""

import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Float, TypeCheckError, jaxtyped

from spmd_tx.models.layers import rms_norm
from tests.support import type_checks
from tests.support.type_checks import checked


def column_sums(dtype=np.float64, wrong=None):
    """A function within a function, of a type that depends on the call."""

    @jaxtyped(typechecker=checked)
    def sums(x_AB: Float[np.ndarray, "A B"], scale: float = 1.0) -> Float[np.ndarray, " B"]:
        return x_AB.sum(0).astype(dtype) * scale if wrong is None else wrong

    return sums


@pytest.mark.parametrize(
    "call",
    [
        lambda: column_sums()(np.ones(3)),
        lambda: column_sums()(np.ones((2, 3), int)),
        lambda: column_sums()(np.ones((2, 3)), "1"),
        lambda: column_sums()(np.ones((2, 3)), scale="1"),
        lambda: column_sums(wrong=np.ones(2))(np.ones((2, 3))),
    ],
    ids=["dimensions", "dtype", "argument", "keyword", "result"],
)
def test_what_is_annotated_otherwise_is_refused(call):
    column_sums()(np.ones((2, 3)))
    with pytest.raises(TypeCheckError):
        call()


def test_a_check_is_made_once_for_equal_signatures(monkeypatch):
    made = []
    beartype = type_checks.beartype
    monkeypatch.setattr(type_checks, "_checks", {})
    monkeypatch.setattr(type_checks, "beartype", lambda function: made.append(function) or beartype(function))
    column_sums()
    assert made == [], "it was never called"
    for _ in range(3):
        column_sums()(np.ones((2, 3)))
    assert len(made) == 2  # of the arguments, and of the result

    @jaxtyped(typechecker=checked)
    def other(x_AB: Float[np.ndarray, " B"]) -> Float[np.ndarray, " B"]:
        return x_AB

    other(np.ones(2))
    assert len(made) == 4


def test_annotations_of_the_models_are_checked():
    with pytest.raises(TypeCheckError):
        rms_norm(jnp.ones((1, 2, 3)), jnp.ones((2, 2)), 1e-6)
