"""What declarations say of models: layers and their order, tensors, and the sizes of adapters."""

from dataclasses import replace

import pytest

from spmd_tx.models.declared.layers import Layer, Norm, in_cycles
from spmd_tx.models.declared.mixers import Softmax
from spmd_tx.models.families.registry import declare

# Numbers of an adapter of rank 1 (train_mlp, train_attn, train_unembed), as hosted Tinker counts them:
# tinker_cookbook.hyperparam_utils.get_lora_param_count, tinker-cookbook 0.6.1.
HOSTED = {
    "Qwen3-235B-A22B": (56_598_528, 3_176_448, 156_032),
    "Qwen3-30B-A3B": (14_450_688, 835_584, 153_984),
    "Qwen3-32B": (5_898_240, 2_490_368, 157_056),
    "Qwen3-4B": (1_327_104, 737_280, 154_496),
    "Qwen3-8B": (1_769_472, 958_464, 156_032),
    "Llama-3.1-70B": (8_847_360, 4_096_000, 136_448),
    "Llama-3.1-8B": (1_769_472, 851_968, 132_352),
    "Llama-3.2-1B": (491_520, 212_992, 130_304),
    "Llama-3.2-3B": (946_176, 573_440, 131_328),
}


def llama(layers: int, width: int, inner: int, heads: int, head_dim: int) -> dict:
    return qwen3(layers, width, inner, heads, 8) | {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "head_dim": head_dim,
    }


def qwen3(layers: int, width: int, inner: int, heads: int, kv_heads: int, experts: int = 0) -> dict:
    config = {
        "architectures": ["Qwen3MoeForCausalLM" if experts else "Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "intermediate_size": inner,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    }
    if experts:
        config |= {"num_experts": experts, "num_experts_per_tok": 8, "moe_intermediate_size": inner}
    return config


CONFIGS = {
    "Qwen3-235B-A22B": qwen3(94, 4096, 1536, 64, 4, 128),
    "Qwen3-30B-A3B": qwen3(48, 2048, 768, 32, 4, 128),
    "Qwen3-32B": qwen3(64, 5120, 25600, 64, 8),
    "Qwen3-4B": qwen3(36, 2560, 9728, 32, 8),
    "Qwen3-8B": qwen3(36, 4096, 12288, 32, 8),
    "Llama-3.1-70B": llama(80, 8192, 28672, 64, 128),
    "Llama-3.1-8B": llama(32, 4096, 14336, 32, 128),
    "Llama-3.2-1B": llama(16, 2048, 8192, 32, 64),
    "Llama-3.2-3B": llama(28, 3072, 8192, 24, 128),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_an_adapter_has_as_many_numbers_as_a_hosted_one(name):
    numbers = declare(CONFIGS[name]).adapter_numbers("shared-outer")
    assert (numbers["mlp"], numbers["attn"], numbers["unembed"]) == HOSTED[name]


def test_experts_with_factors_of_their_own_have_one_pair_each():
    numbers = declare(CONFIGS["Qwen3-30B-A3B"]).adapter_numbers("per-expert")
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
    model = declare(CONFIGS["Qwen3-8B"])
    kinds = tuple(layer(int(window)) for window in "0110110")
    mixed = replace(model, stack=in_cycles(kinds))
    assert mixed.layers == kinds
    assert [place.prefix for place in mixed.places] == ["0.0.", "0.1.", "0.2.", "1.0."]
    assert [list(place.numbers) for place in mixed.places] == [[0, 3], [1, 4], [2, 5], [6]]
    assert {"0.0.q", "0.1.q", "1.0.o", "head"} <= mixed.adapted.keys()
