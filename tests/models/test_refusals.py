"""What a config.json of each family may not say: it is refused with the key and its value."""

import pytest

from spmd_tx.demo.tiny_model import Spec, model_config
from spmd_tx.errors import StartError
from spmd_tx.models.config import read_model_config
from spmd_tx.models.families.keys import Refusal
from spmd_tx.models.families.registry import FAMILIES, declare


def refusal(family: str, **changed: object) -> str:
    with pytest.raises(Refusal) as refused:
        declare(model_config(Spec(family=family), {}) | changed)
    return str(refused.value)


def yarn(**changed: object) -> dict[str, object]:
    return {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **changed}}


@pytest.mark.parametrize(
    "family, changed",
    [
        ("llama", {"rms_norm_eps": "small"}),
        ("llama", {"num_key_value_heads": "few"}),
        ("llama", {"head_dim": "wide"}),
        ("llama", {"num_hidden_layers": True}),
        ("llama", {"rope_scaling": "yarn"}),
        ("llama", {"layer_types": None, "hidden_act": "gelu"}),
        ("qwen3", {"rope_theta": -1.0}),
        ("mistral", {"sliding_window": "wide"}),
        ("ministral3", {"rope_parameters": [1]}),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("smollm3", {"no_rope_layer_interval": "two"}),
        ("phi3", {"attention_bias": True}),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("glm4_moe", {"scoring_func": "softmax"}),
        ("glm4_moe", {"n_group": "four"}),
        ("deepseek_v3", {"topk_method": "greedy"}),
        ("deepseek_v3", {"moe_layer_freq": 2}),
        ("deepseek_v3", {"n_shared_experts": "one"}),
        ("deepseek_v3", {"routed_scaling_factor": "large"}),
        ("glm4_moe_lite", {"scoring_func": "softmax"}),
        ("gpt_oss", {"hidden_act": "gelu"}),
        ("qwen3_5", {"attn_output_gate": False}),
        ("qwen3_5", {"full_attention_interval": "four"}),
        ("qwen3_5", {"text_config": "none"}),
        ("qwen3_5_moe", {"mlp_only_layers": [1]}),
        ("qwen3_5_moe", {"decoder_sparse_step": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(reversed(value)),
)
def test_a_value_that_a_family_cannot_follow_is_named_with_its_key(family, changed):
    key, value = list(changed.items())[-1]
    assert refusal(family, **changed).startswith(f"sets {key} to {value!r}")


@pytest.mark.parametrize(
    "scaling, said",
    [
        (
            yarn(beta_fast="x"),
            "sets beta_fast of its rotary embedding to 'x', which must be a number from 1e-30",
        ),
        (yarn(factor=-1), "sets factor of its rotary embedding to -1"),
        (
            yarn(factor=1e9),
            "has a factor of 1e+09 in its rotary embedding, times 2048 positions before scaling",
        ),
        (
            yarn(beta_fats=32),
            "sets beta_fats of its rotary embedding to 32, which is not known; known are att",
        ),
        (yarn(truncate="no"), "sets truncate of its rotary embedding to 'no', which must be true or false"),
        (yarn(original_max_position_embeddings=True), "sets original_max_position_embeddings of its rotary"),
        (yarn(beta_fast=1, beta_slow=2), "has a beta_fast of 1 in its rotary embedding, below beta_slow 2"),
        (
            yarn(short_factor=[1.0]),
            "sets rope_type of its rotary embedding to 'yarn', which has no short_factor",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0, "x"] * 4}},
            "sets short_factor of its rotary embedding to 'x', which must be a number",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "sets short_factor of its rotary embedding to [1.0], which must be a list of 8 numbers",
        ),
        ({"rope_scaling": {"factor": 2.0}}, "sets rope_type of its rotary embedding to None"),
        ({"rope_theta": 1}, "sets rope_theta to 1, which must be above 1"),
        ({"partial_rotary_factor": 1e30}, "rotates 16000000000000000318153997418496 of 16 numbers"),
    ],
    ids=str,
)
def test_rotary_embeddings_have_numbers_that_angles_can_be_computed_of(scaling, said):
    assert refusal("qwen3", **scaling).startswith(said)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_latent_attention_rotates_all_that_its_config_gives_for_that(family):
    assert refusal(family, partial_rotary_factor=0.5).startswith(
        "sets partial_rotary_factor to 0.5, which must be 1"
    )


def test_query_heads_share_heads_of_keys_evenly():
    message = refusal("llama", num_attention_heads=6, num_key_value_heads=4)
    assert message == "has 6 num_attention_heads, not a multiple of its 4 num_key_value_heads"


@pytest.mark.parametrize(
    "family, method, said",
    [
        (
            "llama",
            "gptq",
            "to 'gptq', which is not supported; supported are fp8, mxfp4 and compressed-tensors",
        ),
        ("llama", "mxfp4", "to 'mxfp4', which is read of gpt-oss only"),
        ("gpt_oss", "fp8", "quant_method of its quantization_config to 'fp8'; of gpt-oss only mxfp4"),
    ],
)
def test_matrices_that_are_encoded_otherwise_are_refused(family, method, said):
    blocks = {"weight_block_size": [128, 128]}
    assert said in refusal(family, quantization_config={"quant_method": method, **blocks})


@pytest.mark.parametrize(
    "modules, said",
    [
        (
            ["lm_head", "re:mlp.(gate"],
            "'re:mlp.(gate' among the modules of its quantization_config, which is not",
        ),
        ([3], "of its quantization_config to [3], which must be a list of names"),
        ("lm_head", "of its quantization_config to 'lm_head', which must be a list of names"),
    ],
)
@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignore"])
def test_modules_that_are_not_encoded_are_names_or_regular_expressions(key, modules, said):
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], key: modules}
    assert said in refusal("llama", quantization_config=blocks)


@pytest.mark.parametrize(
    "changed, said",
    [
        (
            {"group_size": 12},
            "sets group_size of its compressed-tensors to 12, which must be a multiple of 8",
        ),
        (
            {"group_size": 24},
            "does not fit model.layers.{layer}.self_attn.q_proj: rows of 64 numbers are not a",
        ),
        ({"type": "float"}, "sets type of its compressed-tensors to 'float', which is not read; 'int' is"),
    ],
    ids=str,
)
def test_groups_with_a_scale_must_fit_the_matrices(changed, said):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": 32}
    groups = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": weights | changed}}}
    assert said in refusal("llama", quantization_config={"quant_method": "compressed-tensors", **groups})


def test_an_architecture_that_is_not_served_is_named_with_the_nearest_and_all_others():
    message = refusal("llama", architectures=["DeepseekV32ForCausalLM"], auto_map={"AutoModel": "x.Y"})
    assert message.startswith("holds a DeepseekV32ForCausalLM; supported architectures: ")
    assert "(nearest: DeepseekV3ForCausalLM)" in message
    assert "auto_map) is never run" in message
    assert all(name in message for name in FAMILIES)
    assert refusal("llama", architectures="LlamaForCausalLM").startswith("sets architectures to 'Llama")


def test_a_config_must_be_an_object(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(StartError, match=r"config.json holds a list; it must be an object"):
        read_model_config(tmp_path)


def test_a_config_must_be_a_file_that_can_be_read(tmp_path):
    config = tmp_path / "config.json"
    config.write_text("[" * 100_000)
    with pytest.raises(StartError, match=r"config.json is not valid JSON: .*recursion"):
        read_model_config(tmp_path)
    config.unlink()
    config.mkdir()
    with pytest.raises(StartError, match=r"cannot read .*config.json: Is a directory"):
        read_model_config(tmp_path)
