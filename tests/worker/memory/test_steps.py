"""What steps hold of weights, beside the declared arrays."""

import jax.numpy as jnp
import pytest

from spmd_tx.models.base_weights import weights
from spmd_tx.models.families.registry import declare
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.mesh import abstract_mesh
from spmd_tx.worker.memory.sizes import Sizes, bytes_per_device
from spmd_tx.worker.memory.steps import StepMemory
from tests.support.known_models import CONFIGS
from tests.support.tiny_setup import tiny_setup

MODELS = (
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3.5-35B-A3B",
    "deepseek-ai/DeepSeek-V3.1",
    "openai/gpt-oss-120b",
)


def steps(name: str, full_copies: int = 0) -> StepMemory:
    setup = tiny_setup(adapter_slots=1, max_rank=16, full_copies=full_copies, kernels=Kernels(rows="cudnn"))
    sizes = Sizes(setup, declare(CONFIGS[name]), abstract_mesh(2, 4, 2), jnp.bfloat16)
    return StepMemory(sizes, "gpu", splits_base=True)


@pytest.mark.parametrize("name", MODELS)
def test_the_largest_layer_and_the_head_are_gathered(name):
    held = steps(name)
    declared = weights(held.model, held.mesh, jnp.bfloat16)
    layers = [
        sum(bytes_per_device(held.mesh, declared.layers[place.name(array.name)]) for array in arrays)
        / len(place.numbers)
        for place in held.model.places
        for arrays in (held.model.arrays(place),)
    ]
    expected = max(layers) + bytes_per_device(held.mesh, declared.unembed)
    assert held._gathered_base / 2 == pytest.approx(expected, rel=0.001)


MIXERS = {  # of the largest layer: of attention, and of linear attention
    "Qwen/Qwen3-8B": 4096 * (2 * 4096 + 2 * 1024),
    "Qwen/Qwen3.5-9B": 4096 * (2 * 2048 + 3 * 4096 + 2 * 32),
}


@pytest.mark.parametrize("name", MIXERS)
def test_where_all_weights_are_trained_a_layer_and_both_tables_are_held_besides(name):
    held = steps(name, full_copies=1)
    layer = (MIXERS[name] + 3 * 4096 * 12288) / 2
    table = 4096 * held.model.vocab_size / 2
    assert held._all_trained == pytest.approx(held.sizes.gradient + (2 + 4) * layer + 2 * (2 + 2 * 4) * table)
