import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmd_tx.protocol.kernels import Kernels
from spmd_tx.worker.self_tests.attention import AttentionSizes, implementation, problem_of

pytestmark = pytest.mark.usefixtures("quickly_compiled")

SIZES = AttentionSizes(["reference"], heads=4, kv_heads=2, head_dim=8)
ROWS = {64: [[30, 34], [1, 20, 10], []]}
reference = implementation(Kernels(), 0)


def looks_at_other_segments(q, k, v, segments):
    return reference(q, k, v, jnp.zeros_like(segments))


def finds_keys_by_the_stride_of_queries(q, k, v, segments):
    return reference(q, k[:, :, ::-1], v[:, :, ::-1], segments)


def leaves_the_padding_unset(q, k, v, segments):
    return jnp.where((segments > 0)[:, :, None, None], reference(q, k, v, segments), jnp.nan)


def forgets_one_token(q, k, v, segments):
    return reference(q, k, v, segments).at[1, 0].set(0)


def has_no_gradient_of_keys(q, k, v, segments):
    return reference(q, lax.stop_gradient(k), v, segments)


def doubles_the_gradient_of_values(q, k, v, segments):
    return reference(q, k, 2 * v - lax.stop_gradient(v), segments)


def rounds_coarsely(q, k, v, segments):
    return reference(*(x.astype(jnp.float8_e5m2).astype(x.dtype) for x in (q, k, v)), segments)


def test_the_reference_passes():
    assert problem_of(reference, SIZES, ROWS) is None


@pytest.mark.parametrize(
    "attend, problem",
    [
        (looks_at_other_segments, "output"),
        (finds_keys_by_the_stride_of_queries, "output"),
        (leaves_the_padding_unset, "output"),
        (forgets_one_token, "output"),
        (has_no_gradient_of_keys, "gradient of the keys"),
        (doubles_the_gradient_of_values, "gradient of the values"),
        (rounds_coarsely, "output"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_wrong_is_noticed(attend, problem):
    found = problem_of(attend, SIZES, ROWS)
    assert found is not None
    assert found.startswith(f"{problem} is off")


def test_what_differs_between_two_runs_is_noticed():
    runs = itertools.count()

    def attend(q, k, v, segments):
        shape = jax.ShapeDtypeStruct((), jnp.bfloat16)
        near_one = jax.pure_callback(lambda: np.asarray(1 + next(runs) / 128, shape.dtype), shape)
        return reference(q, k, v, segments) * near_one

    found = problem_of(attend, SIZES, ROWS)
    assert found is not None
    assert "differs between two runs" in found
