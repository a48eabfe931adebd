"""The numbers that a token meets, counted again: by XLA in programs, and by those who publish models."""

import pytest

from spmd_tx.models.attention.blockwise import blocks
from spmd_tx.models.declared.delta_rule import DeltaRule
from spmd_tx.models.declared.layers import Attended, Layer
from spmd_tx.models.families.registry import declare
from spmd_tx.models.linear_attention.delta_rule import CHUNK
from tests.golden import families
from tests.support.flops import flops
from tests.support.known_models import CONFIGS, HOSTED

pytestmark = pytest.mark.usefixtures("quickly_compiled")

LENGTH = (
    32768  # tokens of one row: it is never run, and few places of pairs of a token and an expert are free
)
MORE = 1.03  # what an adapter of rank 1 adds, and free places among those pairs


def flops_of_scores(attended: Attended) -> int:
    """As blockwise.py cuts a row, a block of queries meets all keys up to its end, from its window on."""
    pairs = sum(
        (end - start) * (end - max(0, start - attended.window + 1 if attended.window else 0))
        for start, end in blocks(LENGTH)
    )
    return 2 * pairs * (attended.keys + attended.values)


def flops_of_rule(mixer: DeltaRule) -> int:
    """Return the operations per token of a layer without its linear maps, read in chunks.

    Two products of a chunk with itself per head of keys; per head of values three with the state and two
    within the chunk, and the inverse.
    """
    per_key_head = 4 * CHUNK * mixer.k_width
    per_value_head = 6 * mixer.k_width * mixer.v_width + 4 * CHUNK * mixer.v_width + 2 * CHUNK * CHUNK
    return mixer.k_heads * per_key_head + mixer.v_heads * per_value_head


def flops_between_tokens(layer: Layer) -> int:
    if isinstance(layer.mixer, DeltaRule):
        return LENGTH * flops_of_rule(layer.mixer)
    assert layer.mixer.attended is not None
    return flops_of_scores(layer.mixer.attended)


KNOWN = {
    "llama": "meta-llama/Llama-3.2-1B",
    "mistral": "mistralai/Mistral-7B-v0.3",
    "qwen2": "Qwen/Qwen2.5-7B",
    "phi3": "microsoft/phi-4",
    "smollm3": "HuggingFaceTB/SmolLM3-3B",
    "qwen3": "Qwen/Qwen3-8B",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
    "glm4_moe": "zai-org/GLM-4.5-Air",
    "deepseek_v3": "deepseek-ai/DeepSeek-V3.1",
    "glm4_moe_lite": "zai-org/GLM-4.7-Flash",
    "gpt_oss": "openai/gpt-oss-120b",
    "qwen3_5": "Qwen/Qwen3.5-9B",
    "qwen3_5_moe": "Qwen/Qwen3.5-35B-A3B",
}
MODELS = {family: CONFIGS[name] for family, name in KNOWN.items()} | {
    "ministral3": families.CONFIGS["ministral3"] | {"hidden_size": 1024, "intermediate_size": 2048}
}
QUICK = ("glm4_moe_lite",)  # with experts, one that is shared, dense layers and latents


@pytest.mark.parametrize(
    "family, tp",
    [pytest.param(each, 1, marks=[] if each in QUICK else [pytest.mark.slow]) for each in MODELS]
    + [pytest.param(each, 8, marks=pytest.mark.slow) for each in ("qwen3_moe", "deepseek_v3", "gpt_oss")],
)
def test_a_forward_pass_computes_two_flops_for_each_number_and_token(family, tp):
    model = declare(MODELS[family])
    expected = 2 * LENGTH * model.numbers_met(tp) + sum(map(flops_between_tokens, model.layers)) / tp
    assert expected <= flops(model, (1, LENGTH), tp) < MORE * expected


def test_every_family_is_counted():
    assert set(MODELS) >= {name.removesuffix("_yarn").removesuffix("_longrope") for name in families.CONFIGS}


# Billions of active parameters, as published, and how many of the embedding and the head are among them.
PUBLISHED = {
    "Qwen/Qwen3-30B-A3B": (3.3, 2),
    "Qwen/Qwen3-235B-A22B": (22, 2),
    "Qwen/Qwen3.5-35B-A3B": (3, 1),
    "Qwen/Qwen3.5-397B-A17B": (17, 2),
    "zai-org/GLM-4.5-Air": (12, 0),
    "zai-org/GLM-4.6": (32, 0),  # which has the sizes of GLM-4.5
    "deepseek-ai/DeepSeek-V3.1": (37, 1),
    "moonshotai/Kimi-K2-Thinking": (32, 1),
    "openai/gpt-oss-20b": (3.6, 1),
    "openai/gpt-oss-120b": (5.1, 1),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_mixture_has_as_many_active_parameters_as_are_published(name):
    model, (billions, tables) = declare((CONFIGS | HOSTED)[name]), PUBLISHED[name]
    found = model.numbers_met() + (tables - 1) * model.d_model * model.vocab_size
    assert abs(found / (1e9 * billions) - 1) < 0.03


def test_devices_that_share_a_model_have_some_maps_whole():
    """Those of latents, and keys and values of fewer heads than devices."""
    model = declare(CONFIGS["deepseek-ai/DeepSeek-V3.1"])
    whole = 61 * 7168 * (1536 + 512 + 64) + 58 * 7168 * 256
    assert model.numbers_met(8) == pytest.approx((model.numbers_met() - whole) / 8 + whole)
    model = declare(CONFIGS["Qwen/Qwen3-30B-A3B"])
    whole = 48 * 2048 * (2 * 4 * 128 + 128)
    assert model.numbers_met(8) == pytest.approx((model.numbers_met() - whole) / 8 + whole)
