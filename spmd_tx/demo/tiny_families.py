"""What config.json says of small random models of each family, and the tensors that follow from it."""

import re
from collections.abc import Iterator
from typing import Any

from spmd_tx.errors import StartError
from spmd_tx.models.declared.maps import Map, Parameter, TensorSource
from spmd_tx.models.declared.model import Model

ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 512, "factor": 4.0}
YARN = {**ROPE, "rope_type": "yarn"}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "head_dim": 8,  # what transformers rotates
    "v_head_dim": 16,
    "rope_interleave": True,
}
SIGMOID_ROUTER = {
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
QWEN3_EXPERTS = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
LINEAR = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_position_embeddings": 144,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
    "hidden_act": "gelu_pytorch_tanh",
}
DEEP_TOWER = {**TOWER, "deepstack_visual_indexes": [0, 2]}
# Beside the sizes, by the model_type that config.json names; with a vision_config it nests those of text.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], **QWEN3_EXPERTS},
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "rope_scaling": {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "mistral": {"architectures": ["MistralForCausalLM"]},
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"],
        "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1},
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "phi3": {"architectures": ["Phi3ForCausalLM"]},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layer_interval": 2},
    "glm4_moe": {
        **SIGMOID_ROUTER,
        "architectures": ["Glm4MoeForCausalLM"],
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
    "glm4_moe_lite": {**LATENT, **SIGMOID_ROUTER, "architectures": ["Glm4MoeLiteForCausalLM"]},
    "deepseek_v3": {
        **LATENT,
        **SIGMOID_ROUTER,
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "sliding_window": 128,
        "intermediate_size": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_scaling": {**YARN, "truncate": False},
    },
    "qwen3_vl": {"architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": DEEP_TOWER},
    "qwen3_vl_moe": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "vision_config": DEEP_TOWER,
        **QWEN3_EXPERTS,
    },
    "qwen3_5": {**LINEAR, "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"},
    "qwen3_5_moe": {
        **LINEAR,
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}
# What has a vision tower beside the text model, where a family's models may come without.
PLACED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
SEES = {"vision_config": TOWER, "rope_parameters": PLACED}
SEEING: dict[str, dict[str, Any]] = {
    "qwen3_5": {"architectures": ["Qwen3_5ForConditionalGeneration"], **SEES},
    "qwen3_5_moe": {"architectures": ["Qwen3_5MoeForConditionalGeneration"], **SEES},
}
# What people call models whose family has another name, without sizes and variants.
ALIASES = {
    "deepseek_v3": "DeepSeek-V3.1 DeepSeek-R1 Kimi-K2 Kimi-K2.5 Kimi-K2.6",
    "glm4_moe": "GLM-4.5 GLM-4.6",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "llama": "Llama-3 Llama-3.1 Llama-3.2 Llama-3.3 Meta-Llama-3 Meta-Llama-3.1 DeepSeek-R1-Distill-Llama",
    "mistral": "Mistral-Nemo Mistral-Small",
    "phi3": "Phi-4 Phi-4-mini Phi-4-reasoning Phi-4-reasoning-plus Phi-3-mini Phi-3-medium Phi-3.5-mini",
    "qwen2": "Qwen2.5 DeepSeek-R1-Distill-Qwen",
    "qwen3_5": "Qwen3.6 Qwen3.8",
}
# Where a model's name goes on with its size or its variant; after active parameters it is a mixture.
VARIANT = re.compile(r"-(\d+(\.\d+)?b|air|base|coder|instruct|thinking)\b.*", re.IGNORECASE)
ACTIVE = re.compile(r"-a\d+b\b", re.IGNORECASE)


def family_named(name: str) -> str:
    """Return the family that a user means: "Qwen/Qwen3.5-35B-A3B" is "qwen3_5_moe". Raises StartError."""
    known = {_letters(family): family for family in FAMILIES}
    known |= {_letters(alias): family for family, aliases in ALIASES.items() for alias in aliases.split()}
    family = known.get(_letters(VARIANT.sub("", name.rpartition("/")[2])))
    if family is None:
        raise StartError(
            f"--family is {name!r}; families: {', '.join(FAMILIES)}, or a model of one of them, such as "
            "Llama-3.1-8B"
        )
    mixture = f"{family}_moe"
    return mixture if ACTIVE.search(name) and mixture in FAMILIES else family


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def stored_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a checkpoint by its declaration, as they are stored."""
    table = (model.vocab_size, model.d_model)
    shapes: dict[str, tuple[int, ...]] = {model.embed.name: table, model.final_norm.name: (model.d_model,)}
    if not model.is_tied:
        shapes[model.head.name] = table
    for place in model.places:
        for array in model.arrays(place):
            for number in place.numbers:
                for name, shape in _tensors(array, number):  # several arrays may be parts of one tensor
                    shapes[name] = tuple(map(max, shape, shapes.get(name, shape)))
    for array in model.mtp_arrays:
        shapes |= _tensors(array, 0)
    return shapes | _of_tower(model)


def _of_tower(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the vision tower, if there is one."""
    tower = model.tower
    if tower is None:
        return {}
    groups = (tower.once, 1), (tower.block, tower.depth), (tower.deep_merger, len(tower.deep))
    numbered = ((array, number) for arrays, count in groups for array in arrays for number in range(count))
    return dict(each for array, number in numbered for each in _tensors(array, number))


def _tensors(array: Map | Parameter, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the tensors of one layer's array, as far as it reads them."""
    shape = array.shape if isinstance(array, Parameter) else (array.width_in, array.width_out)
    experts = array.experts if isinstance(array, Map) else 0
    shape = _stored(array.source, shape)
    if experts and array.source.stacked:
        shape, experts = (experts, *shape), 0
    for expert in range(experts or 1):
        yield array.source.name.format(layer=layer, expert=expert), shape


def _stored(source: TensorSource, shape: tuple[int, ...]) -> tuple[int, ...]:
    if source.rows is not None:
        shape = (*shape[:-1], source.rows[1])
    return (*shape[:-2], shape[-1], shape[-2]) if source.transposed else shape
