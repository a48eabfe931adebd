"""Which experts run over the tokens that chose them only. Nothing is computed here."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from spmd_tx.models.adapters.lora import Lora, bank_lora, expert_adapters
from spmd_tx.models.experts import moe
from spmd_tx.models.forward_pass import Pass
from spmd_tx.sharding.mesh import make_mesh
from tests.support.kernels import kernels_of


def paged_attend(*arguments, **sight):
    raise AssertionError("a mixture attends to nothing")


def way(monkeypatch, experts, width, inner, shape, product) -> str:
    """Return how rows of a shape go through so many experts."""
    taken = []

    def note(name, *arguments):
        taken.append(name)
        return jnp.zeros((*shape, width))

    monkeypatch.setattr(moe, "_dense", partial(note, "all experts"))
    monkeypatch.setattr(moe, "_grouped", lambda *arguments: note("chosen experts"))
    array = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    matrices = {"up": array((experts, width, inner))}
    lora = {"gate": Lora(array((experts, 1, 2, width)), array((experts, 1, 2, inner)))}
    routed = jax.ShapeDtypeStruct((*shape, 2), jnp.int32), array((*shape, experts))
    slots = jnp.zeros(shape[0], jnp.int32)
    adapters = expert_adapters(bank_lora, slots, slots, jnp.ones(1))
    how = Pass(paged_attend, adapters.apply, adapters, kernels=kernels_of(product), sequence_parallel=False)
    run = jax.shard_map(
        lambda matrices, lora, h, routed: moe.mixture(matrices, lora, h, routed, how),
        mesh=make_mesh(1, 1, 1),
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )
    jax.eval_shape(run, matrices, lora, array((*shape, width)), routed)
    (found,) = taken
    return found


@pytest.mark.parametrize(
    "experts, width, inner, shape, product, expected",
    [
        (128, 2048, 768, (8, 1024), "triton", "chosen experts"),  # Qwen3-30B-A3B
        (128, 2048, 768, (128, 1), "mosaic", "chosen experts"),  # in a decode
        (128, 2048, 768, (1, 1), "triton", "chosen experts"),
        (128, 2048, 768, (1, 1), "reference", "all experts"),  # on CPUs
        (8, 64, 32, (8, 64), "reference", "all experts"),  # of a tiny model
    ],
)
def test_experts_of_real_models_run_over_the_tokens_that_chose_them(
    monkeypatch, experts, width, inner, shape, product, expected
):
    assert way(monkeypatch, experts, width, inner, shape, product) == expected
