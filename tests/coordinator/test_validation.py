import re

import numpy as np
import pytest

from spmd_tx.coordinator.schemas import (
    AdamParams,
    LoraConfig,
    ModelInput,
    ModelInputChunk,
    OptimizerConfig,
    OptimStepRequest,
    SampleRequest,
    SamplingParams,
)
from spmd_tx.coordinator.validation import (
    Limits,
    adapter_seed,
    check_adam,
    check_forward_backward,
    check_lora,
    check_sample,
)
from spmd_tx.coordinator.wire import Datum, ForwardBackwardRequest
from spmd_tx.errors import InvalidRequest
from spmd_tx.protocol import LOSS_NAMES

LIMITS = Limits(vocab_size=100, max_context=8, max_rank=4)
TOKENS = np.arange(1, 5, dtype=np.int32)
INPUTS = {
    "cross_entropy": {"target_tokens": np.arange(2, 6), "weights": np.ones(4, np.float32)},
    "ppo": {
        "target_tokens": np.arange(2, 6),
        "logprobs": np.full(4, -1.0, np.float32),
        "advantages": np.ones(4, np.float32),
    },
}


def datum(loss_fn: str = "cross_entropy", tokens: np.ndarray = TOKENS, drop: str = "", **changes) -> Datum:
    inputs = {key: value.copy() for key, value in (INPUTS[loss_fn] | changes).items() if key != drop}
    return Datum(tokens, inputs)


def check(*datums: Datum, loss_fn: str = "cross_entropy", config: dict | None = None):
    request = ForwardBackwardRequest("s:train:0", 1, list(datums), loss_fn, config or {}, forward_only=False)
    return check_forward_backward(request, LIMITS)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


# --- losses and their parameters --------------------------------------------------------------------


@pytest.mark.parametrize("loss_fn", LOSS_NAMES)
def test_every_loss_is_accepted_with_its_inputs(loss_fn):
    inputs = "cross_entropy" if loss_fn == "cross_entropy" else "ppo"
    assert check(datum(inputs), loss_fn=loss_fn).kind == LOSS_NAMES.index(loss_fn)


def test_loss_parameters_have_the_documented_defaults():
    ppo, cispo = check(datum("ppo"), loss_fn="ppo"), check(datum("ppo"), loss_fn="cispo")
    assert (ppo.clip_low, ppo.clip_high) == (0.8, 1.2)
    assert (cispo.clip_low, cispo.clip_high) == (0.0, 4.0)
    assert check(datum("ppo"), loss_fn="dro").beta == 0.05


def test_loss_parameters_are_taken_from_the_request():
    loss = check(datum("ppo"), loss_fn="ppo", config={"clip_low_threshold": 0.5})
    assert (loss.clip_low, loss.clip_high) == (0.5, 1.2)


@pytest.mark.parametrize(
    "loss_fn, config, message",
    [
        (
            "gspo",
            {},
            "loss_fn is 'gspo'; this service has cross_entropy, importance_sampling, ppo, cispo, dro",
        ),
        ("ppo", {"clip": 1.0}, "the key 'clip'; those of ppo are: clip_low_threshold, clip_high_threshold"),
        ("importance_sampling", {"beta": 1.0}, "the key 'beta'; those of importance_sampling are: none"),
        ("ppo", {"clip_low_threshold": "low"}, "clip_low_threshold is 'low'; it must be a finite number"),
        (
            "ppo",
            {"clip_high_threshold": float("nan")},
            "clip_high_threshold is nan; it must be a finite number",
        ),
        ("dro", {"beta": -1.0}, "beta is -1.0; it must be a finite number, at least 0"),
        ("ppo", {"clip_low_threshold": 1.5}, "clip_low_threshold 1.5 above clip_high_threshold 1.2"),
    ],
)
def test_a_wrong_loss_or_parameter_is_refused(loss_fn, config, message):
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        check(datum("ppo"), loss_fn=loss_fn, config=config)


# --- datums -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong, message",
    [
        (datum(drop="target_tokens"), "lacks target_tokens; cross_entropy takes target_tokens, weights"),
        (datum(drop="weights"), "loss_fn_inputs lacks weights"),
        (datum(target_tokens=np.arange(3)), "target_tokens has the shape [3] and model_input has 4 tokens"),
        (datum(weights=floats(1, 1, 1, 1, 1)), "weights has the shape [5] and model_input has 4 tokens"),
        (datum(target_tokens=np.ones((4, 2), int)), "the shape [4, 2]; this service takes one target"),
        (datum(weights=np.ones((4, 3), np.float32)), "weights has the shape [4, 3]; this service takes one"),
        (datum(weights=np.float32(1)), "weights has the shape [] and model_input has 4 tokens"),
        (datum(target_tokens=floats(1, 2, 3, 4)), "target_tokens has dtype float32; token ids are integers"),
        (datum(weights=floats(1, np.nan, 1, 1)), "weights has nan at position 1"),
        (datum(weights=floats(1, 1, 1, -np.inf)), "weights has -inf at position 3"),
        (datum(target_tokens=np.array([2, 3, 4, 100])), "target_tokens has 100 at position 3; ids of"),
        (datum(target_tokens=np.array([2, -100, 4, 5])), "target_tokens has -100 at position 1"),
        (datum(tokens=np.array([1, 2, 3, 100], np.int32)), "has 100 at position 3; ids of this"),
        (datum(tokens=np.array([-5, 2, 3, 4], np.int32)), "model_input has -5 at position 0"),
        (datum(tokens=np.zeros(0, np.int32)), "model_input is empty"),
        (datum(tokens=np.ones(9, np.int32)), "model_input has 9 tokens and the context holds 8"),
        (datum(clip_low_threshold=floats(1, 1, 1, 1)), "the key 'clip_low_threshold'; cross_entropy takes"),
        (Datum(TOKENS, {}, problem="a chunk of kind 'image'"), "a chunk of kind 'image'"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_datum_that_cannot_be_used_is_named_with_its_number(wrong, message):
    with pytest.raises(InvalidRequest, match=r"^datum 1: .*" + re.escape(message)):
        check(datum(), wrong, datum())


@pytest.mark.parametrize(
    "wrong, message",
    [
        (datum("ppo", drop="logprobs"), "lacks logprobs; ppo takes target_tokens, logprobs, advantages"),
        (datum("ppo", drop="advantages"), "loss_fn_inputs lacks advantages"),
        (datum("ppo", advantages=floats(1, 1, 1)), "advantages has the shape [3] and model_input has 4"),
        (datum("ppo", logprobs=floats(1, 1, 1)), "logprobs has the shape [3] and model_input has 4 tokens"),
        (datum("ppo", advantages=floats(1, 1, np.inf, 1)), "advantages has inf at position 2"),
        (datum("ppo", logprobs=floats(-1, -1, -np.inf, -1)), "logprobs has -inf at position 2; it must be"),
        (datum("ppo", rewards=floats(1, 1, 1, 1)), "has the key 'rewards'"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_a_reinforcement_datum_that_cannot_be_used_is_refused(wrong, message):
    with pytest.raises(InvalidRequest, match=r"^datum 0: .*" + re.escape(message)):
        check(wrong, loss_fn="ppo")


def test_no_datums_are_refused():
    with pytest.raises(InvalidRequest, match="holds no datums"):
        check()


@pytest.mark.parametrize(
    "harmless, loss_fn",
    [
        (datum(weights=floats(-3, 0, 1e30, 0)), "cross_entropy"),  # weights are gradients of custom losses
        (datum(weights=np.array([0, 1, 1, 0])), "cross_entropy"),
        (datum(target_tokens=np.ones((4, 1), int), weights=np.ones((4, 1), np.float32)), "cross_entropy"),
        (datum(mask=floats(1)), "cross_entropy"),
        (datum("ppo", mask=floats(1), weights=floats(1)), "ppo"),
        (datum("ppo", logprobs=floats(-np.inf, np.nan, -1, -1), advantages=floats(0, 0, 1, 1)), "ppo"),
        (datum("ppo", logprobs=floats(-300, -300, -300, -300)), "importance_sampling"),
        (
            datum(tokens=np.ones(8, np.int32), target_tokens=np.ones(8, int), weights=np.ones(8)),
            "cross_entropy",
        ),
    ],
    ids=[
        "any sign",
        "integer weights",
        "columns",
        "mask",
        "weights of rl",
        "no advantage",
        "huge ratio",
        "full",
    ],
)
def test_what_only_looks_odd_is_accepted(harmless, loss_fn):
    check(harmless, loss_fn=loss_fn)


# --- optimizer and adapter --------------------------------------------------------------------------


def test_adam_parameters_default_to_those_of_the_sdk():
    assert check_adam(OptimStepRequest("m", 1)) == AdamParams()


@pytest.mark.parametrize(
    "params, message",
    [
        ({"learning_rate": -1e-4}, "adam_params.learning_rate is -0.0001; it must be finite and at least 0"),
        ({"learning_rate": float("nan")}, "adam_params.learning_rate is nan"),
        ({"beta1": 1.0}, "adam_params.beta1 is 1.0; it must be at least 0 and below 1"),
        ({"beta2": -0.1}, "adam_params.beta2 is -0.1"),
        ({"eps": float("inf")}, "adam_params.eps is inf"),
        ({"weight_decay": -1.0}, "adam_params.weight_decay is -1.0"),
        ({"grad_clip_norm": -1.0}, "adam_params.grad_clip_norm is -1.0"),
    ],
)
def test_an_adam_parameter_out_of_range_is_refused(params, message):
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        check_adam(OptimStepRequest("m", 1, adam_params=AdamParams(**params)))


def test_another_optimizer_is_refused_by_name():
    with pytest.raises(InvalidRequest, match="'dimuon'; this service has AdamW only"):
        check_adam(OptimStepRequest("m", 1, optimizer_params={"type": "dimuon", "learning_rate": 1e-3}))
    with pytest.raises(InvalidRequest, match="'dimuon'; this service has 'adamw' only"):
        check_lora(LoraConfig(rank=1), OptimizerConfig("dimuon"), LIMITS)


@pytest.mark.parametrize(
    "config, message",
    [
        (LoraConfig(rank=0), "lora_config.rank is 0; it must be between 1 and 4 .*--max-lora-rank"),
        (LoraConfig(rank=5), "lora_config.rank is 5"),
        (LoraConfig(rank=1, train_attn=False, train_mlp=False, train_unembed=False), "trains nothing"),
        (None, "lora_config is missing"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(config, message):
    with pytest.raises(InvalidRequest, match=message):
        check_lora(config, None, LIMITS)


def test_an_adapter_trains_what_its_config_says():
    adapter = check_lora(LoraConfig(rank=4, train_mlp=False), OptimizerConfig(), LIMITS)
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
        (sample(1, 100), "the prompt has the token id 100; ids of this model are 0 to 99"),
        (sample(1, -5), "the prompt has the token id -5"),
        (SampleRequest(ModelInput([ModelInputChunk(data="aGk=")])), "a chunk of kind 'image'; this model"),
        (sample(*range(8)), "the prompt is too long: it has 8 tokens and the context holds 8"),
        (sample(1, 2, 3, max_tokens=6), "6: it has 3 tokens and the context holds 8; send max_tokens 5"),
        (sample(1, max_tokens=0), "max_tokens is 0"),
        (sample(1, num_samples=0), "num_samples is 0; it must be between 1 and 1024"),
        (sample(1, num_samples=1025), "num_samples is 1025"),
        (sample(1, temperature=-1.0), "temperature is -1.0; it must be a finite number, at least 0"),
        (sample(1, temperature=float("nan")), "temperature is nan"),
        (sample(1, top_p=0.0), "top_p is 0.0; it must be above 0 and at most 1"),
        (sample(1, top_p=1.5), "top_p is 1.5"),
        (sample(1, top_k=0), "top_k is 0; it must be at least 1, or -1"),
        (sample(1, top_k=-2), "top_k is -2"),
        (sample(1, seed=2**64), "seed is 18446744073709551616; it must be a 64-bit integer"),
        (sample(1, stop=""), "stop has an empty string"),
        (sample(1, stop=["a", ""]), "stop has an empty string"),
        (sample(1, stop=[100]), "stop has the token id 100"),
        (sample(1, stop=["a", 5]), "stop mixes strings and token ids"),
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
