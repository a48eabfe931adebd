"""Feed-forward blocks of long rows run in parts, with the same losses and gradients, and in less memory."""

import numpy as np
import pytest

from spmd_tx.models import long_rows
from spmd_tx.models.long_rows import parts_of
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.weight import abstract
from spmd_tx.worker.steps.train import make_forward_backward
from tests.support.model_shapes import TINY, resized
from tests.support.tiny_engine import (
    LENGTH,
    ROWS,
    TinyEngine,
    engine_name,
    named_factors,
    random_adapters,
    random_datum,
    tiny_engine,
)
from tools.bench.dummy import Dummy

pytestmark = pytest.mark.usefixtures("quickly_compiled")

TOLERANCE = 2e-6  # relative to the largest entry of a factor's gradient
ENGINES = [
    ((1, 1, 1), "dense", False),
    ((2, 2, 2), "grouped", True),
    *(
        pytest.param(engine, marks=pytest.mark.slow)
        for engine in [
            ((2, 1, 2), "dense", True),
            ((1, 2, 1), "mixture", False),
            ((1, 1, 1), "linear", False),
            ((1, 2, 2), "latent", False),
        ]
    ),
]


def rows():
    return [(random_datum(seed, seed % 3, LENGTH),) for seed in range(ROWS)]


def engine_in_parts(shape, kind, split, level="full"):
    """An engine of its own: those that tests share run rows whole."""
    return TinyEngine(shape, np.float32, kind, split, level, Kernels())


@pytest.mark.parametrize("engine", ENGINES, ids=engine_name)
def test_parts_give_the_same_log_probabilities_and_gradients(engine, monkeypatch):
    shape, kind, split = engine
    whole = tiny_engine(shape, kind=kind, split_base=split)
    w = random_adapters(1, whole.model)
    expected = whole.forward_backward(w, rows())
    monkeypatch.setattr(long_rows, "PART_TOKENS", LENGTH // 4)
    actual = engine_in_parts(shape, kind, split).forward_backward(w, rows())
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    factors = named_factors(actual.grad_sum)
    for name, leaf in named_factors(expected.grad_sum).items():
        np.testing.assert_allclose(factors[name], leaf, rtol=0, atol=TOLERANCE * np.abs(leaf).max())


@pytest.mark.parametrize("length, parts", [(64, 1), (8192, 1), (9216, 2), (40_960, 5), (131_072, 16)])
def test_parts_follow_from_the_length_and_divide_it(length, parts):
    assert parts_of(length, "full") == parts_of(length, "mlp") == parts
    assert length % parts == 0
    assert parts_of(length, None) == parts_of(length, "none") == parts_of(length, "light") == 1


@pytest.mark.slow
def test_a_layer_holds_the_intermediates_of_one_part():
    """Of 8,192 tokens in eight parts the gated block's own are an eighth; the rest stays."""
    model = resized(TINY, d_model=256, d_ff=8192, n_heads=1, n_kv_heads=1, head_dim=64, max_positions=8192)
    dummy, needed = Dummy(model, rank=8, slots=2, dtype=np.float32), []
    trees = dummy.declared_base, *(getattr(dummy.declared_train, name) for name in ("w", "grad_sum", "scale"))
    for part in (8192, 1024):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(long_rows, "PART_TOKENS", part)
            step = make_forward_backward(model, dummy.mesh, dummy.declared_base, dummy.declared_train, "full")
            state = (abstract(dummy.mesh, tree) for tree in trees)
            program = step.lower(*state, *dummy.batch(1, 8192, 2)).compile()
        needed.append(program.memory_analysis().temp_size_in_bytes)
    assert needed[0] - needed[1] > 3 * 4 * 7 / 8 * 8192 * 8192  # at least three arrays of numbers in fp32
