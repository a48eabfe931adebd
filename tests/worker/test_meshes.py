"""Models with latents or with states train alike on every shape of the mesh."""

import numpy as np
import pytest

from tests.support.tiny_engine import (
    deal,
    mesh_name,
    named_factors,
    random_adapters,
    random_datum,
    tiny_engine,
)

pytestmark = pytest.mark.slow

ROWS_OF = [(random_datum(seed, seed % 3, 64 - seed),) for seed in range(4)]
PACKED = [(random_datum(9, 3, 40), random_datum(10, 3, 20))]  # two sequences in a row
TOLERANCE = 2e-5  # relative to the largest number of a factor


def gradient(shape, kind):
    """Log-probabilities by row, as they were dealt, and the gradient of all slots."""
    engine = tiny_engine(shape, kind=kind, split_base=shape[0] > 1)
    rows = deal(engine.data_shards, [ROWS_OF + PACKED])
    result = engine.forward_backward(random_adapters(1, engine.model), rows)
    places = {row[0].targets.tobytes(): index for index, row in enumerate(rows) if row}
    ours = [result.logprobs[places[row[0].targets.tobytes()]] for row in ROWS_OF + PACKED]
    return np.stack(ours), named_factors(result.grad_sum)


@pytest.mark.parametrize(
    "kind, shape",
    [
        ("latent", (2, 1, 1)),
        ("latent", (1, 2, 2)),
        ("latent", (2, 2, 2)),
        ("linear", (1, 1, 2)),
        ("linear", (4, 1, 2)),
    ],
    ids=lambda value: value if isinstance(value, str) else mesh_name(value),
)
def test_log_probabilities_and_gradients_are_those_of_one_device(kind, shape):
    expected, wanted = gradient((1, 1, 1), kind)
    actual, factors = gradient(shape, kind)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-4)
    assert factors.keys() == wanted.keys()
    for name, factor in wanted.items():
        bound = TOLERANCE * np.abs(factor).max()
        np.testing.assert_allclose(factors[name], factor, rtol=0, atol=bound, err_msg=name)
