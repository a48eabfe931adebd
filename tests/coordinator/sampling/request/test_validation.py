import re
from dataclasses import replace

import pytest
from msgspec import structs

from spmd_tx.coordinator.sampling.request.validation import check_sample
from spmd_tx.coordinator.training.validation import adapter_seed, check_lora
from spmd_tx.coordinator.wire.fields import TensorData
from spmd_tx.coordinator.wire.limits import Limits
from spmd_tx.coordinator.wire.sampling import ModelInput, ModelInputChunk, SampleRequest, SamplingParams
from spmd_tx.coordinator.wire.training import LoraConfig
from spmd_tx.errors import InvalidRequest

LIMITS = Limits(vocab_size=100, max_context=8, max_rank=4)

# --- adapter --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, message",
    [
        (LoraConfig(rank=0), "asks to train the base model itself; .* a rank between 1 and 4"),
        (LoraConfig(rank=-1), "lora_config.rank is -1; it must be between 1 and 4 .*--max-lora-rank"),
        (LoraConfig(rank=5), "lora_config.rank is 5"),
        (LoraConfig(rank=1, train_attn=False, train_mlp=False, train_unembed=False), "trains nothing"),
        (None, "lora_config is missing"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(config, message):
    with pytest.raises(InvalidRequest, match=message):
        check_lora(config, None, LIMITS)


def test_all_weights_are_trained_by_models_of_rank_0():
    limits = replace(LIMITS, max_rank=0)
    assert check_lora(None, None, limits).rank == 0
    assert not check_lora(LoraConfig(rank=0, train_mlp=False), None, limits).train_mlp
    with pytest.raises(InvalidRequest, match=r"rank is 8; this server trains all weights .* send rank 0"):
        check_lora(LoraConfig(rank=8), None, limits)


def test_an_adapter_trains_what_its_config_says():
    adapter = check_lora(LoraConfig(rank=4, train_mlp=False), None, LIMITS)
    assert (adapter.rank, adapter.train_attn, adapter.train_mlp, adapter.train_unembed) == (
        4,
        True,
        False,
        True,
    )


@pytest.mark.parametrize("seed", [None, 0, -1, 2**40, 2**63, 2**64 - 1])
def test_any_seed_becomes_one_a_worker_takes(seed):
    assert 0 <= adapter_seed(LoraConfig(rank=1, seed=seed), "s:train:0") < 2**63


def test_models_without_a_seed_differ():
    config = LoraConfig(rank=1)
    assert adapter_seed(config, "s:train:0") != adapter_seed(config, "s:train:1")


# --- samples ----------------------------------------------------------------------------------------


def sample(*prompt: int, num_samples: int = 1, **params) -> SampleRequest:
    chunks = [ModelInputChunk(tokens=list(prompt))]
    return SampleRequest(ModelInput(chunks), SamplingParams(**params), num_samples)


@pytest.mark.parametrize(
    "request_, message",
    [
        (sample(), "the prompt is empty"),
        (SampleRequest(ModelInput([])), "the prompt is empty"),
        (sample(1, 100), "the prompt has the token ID 100; IDs of this model are 0 to 99"),
        (sample(1, -5), "the prompt has the token ID -5"),
        (SampleRequest(ModelInput([ModelInputChunk(data="aGk=")])), "a chunk of kind 'image'; this model"),
        (SampleRequest(ModelInput([ModelInputChunk(tokens=[1], data="aGk=")])), "a chunk of kind 'unknown'"),
        (sample(*range(8)), "the prompt is too long: it has 8 tokens and the context holds 8"),
        (sample(1, 2, 3, max_tokens=6), "6: it has 3 tokens and the context holds 8; send max_tokens 5"),
        (sample(1, max_tokens=0), "max_tokens is 0"),
        (sample(1, num_samples=0), "num_samples is 0; it must be between 1 and 1024"),
        (sample(1, num_samples=1025), "num_samples is 1025"),
        (sample(1, temperature=-1.0), "temperature is -1.0; it must be a finite number, at least 0"),
        (sample(1, temperature=float("nan")), "temperature is nan"),
        (sample(1, temperature=1e39), "temperature is 1e+39"),
        (sample(1, top_p=0.0), "top_p is 0.0; it must be above 0 and at most 1"),
        (sample(1, top_p=1.5), "top_p is 1.5"),
        (sample(1, top_k=0), "top_k is 0; it must be at least 1, or -1"),
        (sample(1, top_k=-2), "top_k is -2"),
        (sample(1, seed=2**64), "seed is 18446744073709551616; it must be a 64-bit integer"),
        (sample(1, stop=""), "stop has an empty string"),
        (sample(1, stop=["a", ""]), "stop has an empty string"),
        (sample(1, stop=["a"] * 65), "stop has 65 strings; at most 64"),
        (sample(1, stop="x" * 1025), "stop has a string of 1025 bytes; at most 1024"),
        (sample(1, stop=["a", "\xf6" * 513]), "stop has a string of 1026 bytes"),
        (sample(1, stop=[1] * 1025), "stop has 1025 token IDs; at most 1024"),
        (sample(1, stop=[100]), "stop has the token ID 100"),
        (sample(1, stop=["a", 5]), "stop mixes strings and token IDs"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_sample_that_cannot_be_drawn_is_refused(request_, message):
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        check_sample(request_, LIMITS)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"max_tokens": 7},
        {"temperature": 0.0},
        {"top_k": 10**9},  # clamped to the vocabulary
        {"seed": 2**40},
        {"seed": -(2**63)},
        {"seed": 2**64 - 1},
        {"stop": "\n"},
        {"stop": ["a", "b"]},
        {"stop": ["x" * 1024] * 64},
        {"stop": []},
        {"stop": [0, 99]},
    ],
    ids=str,
)
def test_a_sample_within_its_limits_is_accepted(params):
    check_sample(sample(1, **params), LIMITS)


def test_flags_that_ask_for_nothing_are_accepted():
    chunks = [ModelInputChunk(tokens=[1]), ModelInputChunk(tokens=[]), ModelInputChunk(tokens=[2])]
    request = SampleRequest(
        ModelInput(chunks), topk_prompt_logprobs=0, prompt_alt_tokens_k=0, record_stability_info=True
    )
    check_sample(request, LIMITS)


SCORES = [
    {"prompt_logprobs": True},
    {"topk_prompt_logprobs": 2},
    {"prompt_alt_tokens_k": 1},
    {"target_prompt_logprobs": TensorData([1] * 7, "int64", [7, 1])},
]


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("max_tokens", [None, 0, 1])
def test_the_scores_of_a_prompt_that_fills_the_context_may_be_asked_for(scores, max_tokens):
    check_sample(structs.replace(sample(*range(8), max_tokens=max_tokens), **scores), LIMITS)


@pytest.mark.parametrize(
    "length, max_tokens, message",
    [
        (9, 1, "it has 9 tokens and the context holds 8; shorten it to 8 or less"),
        (9, None, "it has 9 tokens and the context holds 8; shorten it to 8 or less"),
        (8, 2, "for max_tokens 2: it has 8 tokens and the context holds 8; send max_tokens 1 or less"),
        (7, 2, "for max_tokens 2: it has 7 tokens and the context holds 8; send max_tokens 1 or less"),
        (7, -1, "max_tokens is -1; it must be at least 0, or left out"),
    ],
)
def test_a_prompt_to_be_scored_has_bounds(length, max_tokens, message):
    wanted = structs.replace(sample(*range(length), max_tokens=max_tokens), prompt_logprobs=True)
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        check_sample(wanted, LIMITS)
