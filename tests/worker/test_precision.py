"""With weights in bfloat16, products are in bfloat16, and what is delicate is in float32."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxprs_in_params

from spmd_tx.models.declared.tower import PATCH_NUMBERS, Tower
from spmd_tx.models.vision.tower_weights import sight
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.weight import abstract
from spmd_tx.worker.accelerator import keep_float32
from spmd_tx.worker.steps.adamw import ADAMW, AdamWInputs
from spmd_tx.worker.steps.images import make_encode_images
from spmd_tx.worker.steps.optimizer import make_optim_step
from spmd_tx.worker.steps.sample import make_decode, make_prefill
from spmd_tx.worker.steps.train import make_forward_backward
from tests.support.model_shapes import TINY
from tools.bench.dummy import Dummy

ROWS, LENGTH, STEPS = 2, 64, 2
# Norms, rotations, softmax, log-probabilities, SwiGLU's gate and the optimizer are made of these.
DELICATE = {
    *("exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "sin", "cos", "rsqrt", "sqrt", "sort"),
    *("div", "integer_pow", "pow", "square", "reduce_max", "reduce_prod", "cumsum", "argmax", "top_k"),
}


@pytest.fixture(scope="module")
def dummy():
    return Dummy(TINY, rank=4, slots=2, dtype=jnp.bfloat16)


def traced(step, dummy, declared, *args):
    """Trace as where float32 was asked for: its products must not be rounded."""
    with jax.default_matmul_precision("highest"):
        return step.trace(*(abstract(dummy.mesh, tree) for tree in declared), *args)


def trained(dummy):
    step = make_forward_backward(TINY, dummy.mesh, dummy.declared_base, dummy.declared_train, "mlp")
    train = dummy.declared_train
    declared = (dummy.declared_base, train.w, train.grad_sum, train.scale)
    return traced(step, dummy, declared, *dummy.batch(ROWS, LENGTH, 2))


def decoded(dummy):
    cache = dummy.declared_cache(ROWS, LENGTH)
    step = make_decode(TINY, dummy.mesh, dummy.declared_base, dummy.declared_bank, cache, STEPS)
    state, tables, rows = dummy.decode_rows(ROWS, LENGTH, STEPS)
    args = (state, state, tables, rows, np.zeros(1, np.int32), np.int32(0), np.int32(STEPS))
    return traced(step, dummy, (dummy.declared_base, dummy.declared_bank, cache), *args)


def prefilled(dummy):
    cache = dummy.declared_cache(ROWS, LENGTH)
    sampling = (dummy.declared_base, dummy.declared_bank, cache)
    step = make_prefill(TINY, dummy.mesh, *sampling, logprobs=True)
    packed, _ = dummy.batch(ROWS, LENGTH)
    pages = np.ones((ROWS, LENGTH), np.int32)
    return traced(step, dummy, sampling, packed, pages, None, None)


TRACED = {"training": trained, "decoding": decoded, "prefilling": prefilled}


@pytest.fixture(scope="module")
def training(dummy):
    return trained(dummy)


@pytest.fixture(scope="module")
def decoding(dummy):
    return decoded(dummy)


@pytest.fixture(scope="module")
def prefilling(dummy):
    return prefilled(dummy)


@pytest.fixture(params=[*TRACED])
def program(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def encoding(dummy):
    """A tower with a deep merger."""
    tower = Tower(depth=2, width=64, inner=96, heads=4, side=8, out=TINY.d_model, deep=(0,))
    declared = sight(tower, 64, dummy.mesh, dummy.dtype)
    step = make_encode_images(replace(TINY, tower=tower), dummy.mesh, *declared, Kernels())
    pixels, grids = np.zeros((1, 256, PATCH_NUMBERS), np.uint8), np.full((1, 2), 16, np.int32)
    return traced(step, dummy, declared, pixels, grids, np.arange(64, dtype=np.int32)[None])


def equations(jaxpr):
    """Of a program and of all programs in it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def dtypes(atoms):
    return [x.aval.dtype for x in atoms if jnp.issubdtype(x.aval.dtype, jnp.floating)]


def test_delicate_operations_are_in_float32(program):
    found = [(e.primitive.name, dtypes(e.invars)) for e in equations(program.jaxpr.jaxpr)]
    assert {"exp", "rsqrt", "sin", "logistic"} <= {name for name, _ in found}, "the inspection sees all"
    assert not [name for name, types in found if name in DELICATE and jnp.bfloat16 in types]


def test_products_take_bfloat16(program):
    """One operand in float32 would make a GPU take ten times as long: on the backward pass, too."""
    products = [e for e in equations(program.jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) > 10
    assert {dtype for e in products for dtype in dtypes(e.invars)} == {jnp.dtype(jnp.bfloat16)}


def test_the_tower_rounds_where_the_rest_does(encoding):
    found = [(e.primitive.name, e) for e in equations(encoding.jaxpr.jaxpr)]
    names = {name for name, _ in found}
    assert {"exp", "rsqrt", "sin", "tanh", "erfc"} <= names, "the inspection sees all"
    in_float32 = [e for name, e in found if name in DELICATE | {"erfc"}]
    assert not [e for e in in_float32 if jnp.bfloat16 in dtypes(e.invars)]
    products = [e for name, e in found if name == "dot_general"]
    assert {dtype for e in products for dtype in dtypes(e.invars)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(
    "dtype, platform, expected",
    [
        ("float32", "gpu", "highest"),
        ("float32", "tpu", "highest"),
        ("float32", "cpu", None),
        ("bfloat16", "gpu", None),
        ("auto", "tpu", None),
    ],
)
def test_products_of_float32_are_not_rounded_where_float32_was_asked_for(dtype, platform, expected):
    assert jax.config.jax_default_matmul_precision is None
    try:
        keep_float32(dtype, platform)
        assert jax.config.jax_default_matmul_precision == expected
    finally:
        jax.config.update("jax_default_matmul_precision", None)


def test_every_product_has_the_precision_that_was_set(program):
    """None is computed by something that has a precision of its own, or none."""
    products = [e for e in equations(program.jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    assert len(products) > 10
    highest = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    assert {e.params["precision"] for e in products} == {highest}


def test_logits_and_scores_are_not_rounded(program):
    """Unrounded means that the product itself brings float32."""
    products = [e for e in equations(program.jaxpr.jaxpr) if e.primitive.name == "dot_general"]
    unrounded = [e.outvars[0].aval.shape for e in products if e.outvars[0].aval.dtype == jnp.float32]
    assert any(shape[-1] == TINY.vocab_size for shape in unrounded), "logits"
    assert any(shape[-1] != TINY.vocab_size for shape in unrounded), "scores"


def test_gradients_log_probabilities_and_losses_are_float32(training):
    grad_sum, logprobs, losses = training.out_info
    types = {leaf.dtype for leaf in jax.tree.leaves((grad_sum, logprobs, losses))}
    assert types == {jnp.dtype(jnp.float32)}


def test_the_optimizer_is_float32(dummy):
    step = make_optim_step(dummy.model, dummy.mesh, dummy.declared_train, ADAMW)
    hyper = AdamWInputs(*[np.float32(1)] * 6)
    program = traced(step, dummy, (dummy.declared_train,), np.int32(0), hyper)
    assert {dtype for e in equations(program.jaxpr.jaxpr) for dtype in dtypes(e.invars)} == {
        jnp.dtype(jnp.float32)
    }
