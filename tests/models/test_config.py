"""What a model directory must say of its model, and what is refused."""

import json

import msgspec
import pytest

from spmd_tx.demo import tiny_model
from spmd_tx.errors import StartError
from spmd_tx.models.config import read_model_config
from spmd_tx.models.declared.model import Model


@pytest.fixture
def path(tmp_path):
    return tiny_model.write(tmp_path, tiny_model.PRESETS["tiny-moe"])


def change(path, **values):
    raw = json.loads((path / "config.json").read_text()) | values
    kept = {key: value for key, value in raw.items() if value != "absent"}
    (path / "config.json").write_text(json.dumps(kept))


def test_the_experts_of_a_mixture_are_read(path):
    model = read_model_config(path)
    assert (model.n_experts, model.experts_per_token, model.d_ff) == (8, 2, 32)
    assert model.mixture.route.normalise


def test_the_number_of_experts_has_two_names(path):
    change(path, num_experts="absent", num_local_experts=8)
    assert read_model_config(path).n_experts == 8


@pytest.mark.parametrize(
    "values", [{"decoder_sparse_step": "absent", "mlp_only_layers": "absent"}, {"mlp_only_layers": None}]
)
def test_a_stack_of_experts_need_not_say_so(path, values):
    change(path, **values)
    assert read_model_config(path).n_experts == 8


@pytest.mark.parametrize(
    "values, message",
    [
        ({"decoder_sparse_step": 2}, "sets decoder_sparse_step to 2, so that only some layers have experts"),
        ({"mlp_only_layers": [0]}, r"sets mlp_only_layers to \[0\], so that only some layers have experts"),
        ({"num_experts_per_tok": 9}, "has 8 experts and chooses 9 of them"),
        ({"moe_intermediate_size": "absent"}, "lacks the key 'moe_intermediate_size'"),
        ({"architectures": ["MixtralForCausalLM"]}, "holds a MixtralForCausalLM; supported architectures: "),
    ],
)
def test_what_is_not_supported_is_refused(path, values, message):
    change(path, **values)
    with pytest.raises(StartError, match=message):
        read_model_config(path)


def test_services_that_hold_a_configuration_have_a_type_that_routes_can_check():
    """Litestar checks dependencies with msgspec, which has no unions of several dataclasses."""
    msgspec.json.Decoder(Model)


def family(path, architecture, **values):
    """A Llama, or what says so, with these keys besides."""
    raw = {
        "architectures": [architecture],
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
    }
    (path / "config.json").write_text(json.dumps(raw | values))
    return read_model_config(path)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    "architecture, values, positions",
    [
        ("LlamaForCausalLM", {}, 4096),
        ("MistralForCausalLM", {"sliding_window": 1024}, 1024),
        ("Qwen2ForCausalLM", {"sliding_window": 1024, "use_sliding_window": False}, 4096),
        ("LlamaForCausalLM", {"rope_theta": 1e6, "rope_scaling": YARN}, 8192),
    ],
)
def test_a_model_has_as_many_positions_as_it_can_tell_apart(path, architecture, values, positions):
    model = family(path, architecture, **values)
    assert model.max_positions == positions
    assert (model.head_dim, model.n_kv_heads) == (8, 8)


@pytest.mark.parametrize(
    "architecture, values, message",
    [
        ("LlamaForCasualLM", {}, r"holds a LlamaForCasualLM; .*nearest: LlamaForCausalLM"),
        ("StarForCausalLM", {"auto_map": {"AutoModel": "star.Star"}}, r"\(auto_map\) is never run"),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, "sets use_sliding_window to True"),
        (
            "SmolLM3ForCausalLM",
            {"no_rope_layers": [0, 1]},
            "has no positions in its first layer, by no_rope_layers",
        ),
        (
            "SmolLM3ForCausalLM",
            {"no_rope_layers": [1]},
            r"sets no_rope_layers to \[1\], which are 1 for 2 layers",
        ),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "sets hidden_act to 'gelu'"),
        (
            "LlamaForCausalLM",
            {"num_hidden_layers": "two"},
            "num_hidden_layers to 'two', which must",
        ),
        (
            "LlamaForCausalLM",
            {"num_hidden_layers": 10**9},
            "num_hidden_layers to 10+, which must .* to 1000",
        ),
        ("LlamaForCausalLM", {"num_key_value_heads": 2**31}, "num_key_value_heads to .* to 2147483647"),
        (
            "LlamaForCausalLM",
            {"rope_scaling": {"rope_type": "dynamic"}},
            "'dynamic', which is not",
        ),
    ],
)
def test_what_a_family_has_not_is_refused_by_its_key(path, architecture, values, message):
    with pytest.raises(StartError, match=message):
        family(path, architecture, **values)
