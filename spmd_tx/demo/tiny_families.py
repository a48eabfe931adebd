"""What config.json says of small random models of each family, and the tensors that follow from it."""

from typing import Any

from spmd_tx.models.declared.layers import Model
from spmd_tx.models.declared.maps import Map, Parameter, Source

ROPE = {"rope_theta": 10000.0, "original_max_position_embeddings": 512, "factor": 4.0}
# Beside the sizes, by the name of the family; Qwen3 is made from a Spec (tiny_model.py).
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_theta": 10000.0,
        "rope_scaling": {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"],
        "model_type": "ministral3",
        "rope_parameters": {**ROPE, "rope_type": "yarn", "llama_4_scaling_beta": 0.1},
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
    },
}


def stored_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a checkpoint of the model, as they are stored."""
    table = (model.vocab_size, model.d_model)
    shapes: dict[str, tuple[int, ...]] = {model.embed.name: table, model.final_norm.name: (model.d_model,)}
    if model.head is not None:
        shapes[model.head.name] = table
    for place in model.places:
        for array in model.arrays(place):
            for number in place.numbers:
                for name, shape in _tensors(array, number):
                    shapes[name] = tuple(map(max, shape, shapes.get(name, shape)))
    return shapes


def _tensors(array: Map | Parameter, layer: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return the tensors of one layer's array, as far as it reads them."""
    experts = array.experts if isinstance(array, Map) else 0
    shape = (array.width_in, array.width_out) if isinstance(array, Map) else array.shape
    shape = _stored(array.source, shape)
    if array.source.stacked and experts:
        shape, experts = (experts, *shape), 0
    name = array.source.name
    return [(name.format(layer=layer, expert=expert), shape) for expert in range(experts or 1)]


def _stored(source: Source, shape: tuple[int, ...]) -> tuple[int, ...]:
    if source.rows is not None:
        shape = (*shape[:-1], source.rows[1])
    return (*shape[:-2], shape[-1], shape[-2]) if source.transposed else shape
