"""Each row's own factors out of factors that are split over fsdp, and their gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_tx.models.adapters.lora import Lora
from spmd_tx.models.adapters.row_lora import RowsLora, StoredLora, row_lora, take_rows
from spmd_tx.models.named import Named
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.collectives import varying
from spmd_tx.sharding.mesh import DATA, FSDP, make_mesh

pytestmark = pytest.mark.usefixtures("quickly_compiled")

WIDTH_IN, WIDTH_OUT, RANK, TOKENS, DEVICES = 16, 8, 2, 3, 4


def inputs(slots, rows):
    random = np.random.default_rng(rows)
    x, slope = (random.standard_normal((DEVICES * rows, TOKENS, w)) for w in (WIDTH_IN, WIDTH_OUT))
    a, b = (random.standard_normal((slots, RANK, width)) for width in (WIDTH_IN, WIDTH_OUT))
    scale = np.linspace(0.5, 2.0, slots)
    arrays = [jnp.asarray(each, jnp.float32) for each in (a, b, x, slope, scale)]
    return *arrays, jnp.asarray(random.integers(0, slots, DEVICES * rows), jnp.int32)


@jax.jit
def by_the_book(a, b, x, slope, scale, slots):
    def run(a, b):
        h = jnp.einsum("BTI,BRI->BTR", x, a[slots]) * scale[slots][:, None, None]
        return jnp.einsum("BTR,BRO->BTO", h, b[slots])

    y, pull_back = jax.vjp(run, a, b)
    return y, *pull_back(slope)


@pytest.mark.parametrize("slots, rows, is_exchanged", [(5, 2, True), (3, 3, False)])
def test_rows_have_their_own_factors_and_slots_the_sums_of_their_rows(slots, rows, is_exchanged):
    stored = P(None, None, FSDP)
    taken = []

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=make_mesh(DEVICES, 1, 1),
        in_specs=(stored, stored, P(DATA), P(DATA), P(), P(DATA)),
        out_specs=(P(DATA), stored, stored),
    )
    def found(a, b, x, slope, scale, slots_B):
        take, apply = take_rows(slots_B, x.dtype, Kernels()), row_lora(slots_B, scale, Kernels())

        def run(a, b):
            pair: Lora = StoredLora(varying(a), varying(b), WIDTH_IN, WIDTH_OUT)
            taken.append(take(Named({"q": pair, "router": Lora(a, b)})))
            return apply(varying(x), taken[-1]["q"])

        y, pull_back = jax.vjp(run, a, b)
        return jax.lax.psum(y, ("ep", "tp")), *pull_back(varying(slope))

    arrays = inputs(slots, rows)
    for ours, theirs in zip(found(*arrays), by_the_book(*arrays), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    assert isinstance(taken[0]["q"], RowsLora) == is_exchanged
    assert list(taken[0]) == ["q", "router"]
    assert not isinstance(taken[0]["router"], RowsLora)
