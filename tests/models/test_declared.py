"""What declarations say of models: layers and their order, tensors, and the sizes of adapters."""

from dataclasses import replace

import pytest

from spmd_tx.models.declared.layers import Layer, Norm, in_cycles
from spmd_tx.models.declared.mixers import Softmax
from spmd_tx.models.families.registry import declare
from tests.support.known_models import ALIKE, CONFIGS
from tests.support.known_models import HOSTED as FURTHER
from tests.support.model_shapes import adapter_numbers

# Numbers of an adapter of rank 1 (train_mlp, train_attn, train_unembed), as hosted Tinker counts them:
# tinker_cookbook.hyperparam_utils.get_lora_param_count, tinker-cookbook 0.6.1.
HOSTED = {
    "deepseek-ai/DeepSeek-V3.1": (94_307_328, 2_440_000, 136_448),
    "Qwen/Qwen3-235B-A22B": (56_598_528, 3_176_448, 156_032),
    "Qwen/Qwen3-30B-A3B": (14_450_688, 835_584, 153_984),
    "Qwen/Qwen3-32B": (5_898_240, 2_490_368, 157_056),
    "Qwen/Qwen3-4B": (1_327_104, 737_280, 154_496),
    "Qwen/Qwen3.5-27B": (4_325_376, 2_965_504, 253_440),
    "Qwen/Qwen3.5-397B-A17B": (96_030_720, 2_841_600, 252_416),
    "Qwen/Qwen3.5-4B": (1_130_496, 897_024, 250_880),
    "Qwen/Qwen3.5-35B-A3B": (16_281_600, 1_013_760, 250_368),
    "Qwen/Qwen3.5-9B": (1_572_864, 1_130_496, 252_416),
    "Qwen/Qwen3-VL-235B-A22B-Instruct": (56_598_528, 3_176_448, 156_032),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": (14_450_688, 835_584, 153_984),
    "Qwen/Qwen3-8B": (1_769_472, 958_464, 156_032),
    "meta-llama/Llama-3.1-70B": (8_847_360, 4_096_000, 136_448),
    "meta-llama/Llama-3.1-8B": (1_769_472, 851_968, 132_352),
    "meta-llama/Llama-3.2-1B": (491_520, 212_992, 130_304),
    "meta-llama/Llama-3.2-3B": (946_176, 573_440, 131_328),
    "moonshotai/Kimi-K2-Thinking": (144_583_680, 1_940_288, 171_008),
    "moonshotai/Kimi-K2.6": (144_583_680, 1_940_288, 171_008),
    "openai/gpt-oss-20b": (6_842_880, 497_664, 203_968),
    "openai/gpt-oss-120b": (40_124_160, 746_496, 203_968),
}


@pytest.mark.parametrize("name", HOSTED)
def test_an_adapter_has_as_many_numbers_as_a_hosted_one(name):
    numbers = adapter_numbers(declare((CONFIGS | FURTHER)[name]))
    assert (numbers["mlp"], numbers["attn"], numbers["unembed"]) == HOSTED[name]


def test_models_of_the_same_sizes_are_counted():
    assert set(ALIKE.values()) <= set(HOSTED)
    assert set(FURTHER) <= set(HOSTED)


def test_experts_with_factors_of_their_own_have_one_pair_each():
    model = replace(declare(CONFIGS["Qwen/Qwen3-30B-A3B"]), expert_lora="per-expert")
    numbers = adapter_numbers(model)
    assert numbers["mlp"] == 48 * 128 * 3 * (2048 + 768)


def layer(window: int) -> Layer:
    return Layer(Softmax(4, 2, 8, None, 1e-6, window=window), None, Norm(1e-6))


@pytest.mark.parametrize(
    "windows, cycles",
    [
        ("00000000", [("0", 8)]),
        ("10101010", [("10", 4)]),
        ("11101110", [("1110", 2)]),
        ("0001111", [("0", 3), ("1", 4)]),
        ("01121121", [("0", 1), ("112", 2), ("1", 1)]),
    ],
)
def test_a_sequence_of_layers_becomes_the_longest_cycles(windows, cycles):
    stack = in_cycles(tuple(layer(int(window)) for window in windows))
    found = [("".join(str(each.mixer.window) for each in cycle.layers), cycle.repeats) for cycle in stack]
    assert found == cycles


def test_layers_of_several_kinds_keep_their_order_and_have_arrays_of_their_own():
    model = declare(CONFIGS["Qwen/Qwen3-8B"])
    kinds = tuple(layer(int(window)) for window in "0110110")
    mixed = replace(model, stack=in_cycles(kinds))
    assert mixed.layers == kinds
    assert [place.prefix for place in mixed.places] == ["0.0.", "0.1.", "0.2.", "1.0."]
    assert [list(place.numbers) for place in mixed.places] == [[0, 3], [1, 4], [2, 5], [6]]
    assert {"0.0.q", "0.1.q", "1.0.o", "head"} <= mixed.adapted.keys()
