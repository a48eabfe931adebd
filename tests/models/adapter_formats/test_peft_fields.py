import pytest

from spmd_tx.errors import InvalidRequest
from spmd_tx.models.adapter_formats.peft_fields import check_fields

# What PEFT 0.21 writes for a plain adapter.
PLAIN = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "Qwen/Qwen3-0.6B",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 16,
    "lora_bias": False,
    "lora_dropout": 0.05,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 8,
    "rank_pattern": {},
    "revision": None,
    "runtime_config": {"ephemeral_gpu_offload": True},
    "target_modules": ["q_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": True,
    "velora_config": None,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"init_lora_weights": False},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"corda_config": {"corda_method": "kpm"}, "revision": "main"},  # as peft has converted it
        {"a_field_of_tomorrow": None, "another": False},
    ],
)
def test_plain_adapters_are_taken(changes):
    check_fields(PLAIN | changes, "adapter_config.json")


@pytest.mark.parametrize(
    "name, value",
    [
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "OLoRA"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", 1),
        ("alora_invocation_tokens", [30, 31]),
        ("arrow_config", {"top_k": 3}),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("enable_lora", [True, False, True]),
        ("ensure_weight_tying", True),
        ("fan_in_fan_out", True),
        ("kasa_config", {"beta": 1e-4}),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("lora_bias", True),
        ("megatron_config", {"hidden_size": 8}),
        ("modules_to_save", ["lm_head"]),
        ("monteclora_config", {"num_samples": 8}),
        ("peft_type", "ADALORA"),
        ("revision", "step-1000"),
        ("trainable_token_indices", [5]),
        ("trainable_token_indices", {"embed_tokens": [5]}),
        ("use_bdlora", {"nblocks": 2}),
        ("use_dora", True),
        ("use_qalora", True),
        ("velora_config", {"scale": 1.0}),
        ("a_field_of_tomorrow", {"mode": "x"}),
    ],
)
def test_what_means_something_else_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequest, match=rf"^{name} of adapter_config.json is .*; "):
        check_fields(PLAIN | {name: value}, "adapter_config.json")
