"""Attention among the patches of an image: TPUs' kernel, run as a plain program, beside the reference."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models.vision import flash
from spmd_tx.models.vision.attention import IMPLEMENTATIONS, attend, candidates
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.worker.self_tests import images as self_test
from spmd_tx.worker.self_tests.images import ImageSizes, problem_of

pytestmark = pytest.mark.usefixtures("quickly_compiled")

SIZES = ImageSizes([], heads=2, width=24)
COUNTS = {256: (4, 252, 256)}
reference = jax.jit(partial(attend, Kernels()))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(flash, "BLOCK", 128)
    monkeypatch.setattr(self_test, "implementation", exact)  # of the reference, for all tests


exact = cache(self_test.implementation)
kernel = jax.jit(partial(attend, Kernels(images="mosaic", interpret=True)))


def test_the_kernel_attends_to_all_patches_that_are_there_and_to_no_others():
    random = np.random.default_rng(0)
    arrays = random.standard_normal((3, 384, 2, 24), np.float32)
    for count in (1, 128, 130, 384):
        found, wanted = (np.asarray(run(*arrays, np.int32(count))) for run in (kernel, reference))
        np.testing.assert_allclose(found[:count], wanted[:count], rtol=0, atol=2e-6)
    assert np.isfinite(kernel(*arrays, np.int32(0))).all(), "of a device without an image"


def test_the_kernel_and_the_reference_pass_the_self_test():
    assert problem_of(kernel, SIZES, {256: (130,)}) is None
    assert problem_of(reference, SIZES, COUNTS) is None


def is_causal(q, k, v, count):
    rows = [reference(q, k, v, jnp.minimum(count, end)) for end in (64, 256)]
    return jnp.where(jnp.arange(len(q))[:, None, None] < 64, *rows)


def attends_to_what_is_not_there(q, k, v, count):
    return reference(q, k, v, jnp.int32(len(q)))


def mixes_heads(q, k, v, count):
    return reference(q, k[:, ::-1], v, count)


def forgets_the_scale(q, k, v, count):
    return reference(q * 24**0.5, k, v, count)


def sees_a_trace_of_what_is_behind(q, k, v, count):
    return reference(q, k, v, count) * (1 + jnp.max(v) / 128)


@pytest.mark.parametrize(
    "attend, problem",
    [
        (is_causal, "is off"),
        (attends_to_what_is_not_there, "is off"),
        (mixes_heads, "is off"),
        (forgets_the_scale, "is off"),
        (sees_a_trace_of_what_is_behind, "depends on what is behind"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_wrong_is_noticed(attend, problem):
    assert problem in str(problem_of(attend, SIZES, COUNTS))


def test_kernels_are_for_towers_in_bfloat16_on_accelerators():
    assert candidates("gpu", True, True) == ["cudnn", "reference"]
    assert candidates("tpu", True, True) == ["mosaic", "reference"]
    others = [("cpu", True, True), ("gpu", False, True), ("tpu", True, False)]
    assert [candidates(*each) for each in others] == [["reference"]] * 3
    assert list(IMPLEMENTATIONS)[-1] == Kernels().images == "reference"
