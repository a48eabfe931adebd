"""Qwen3, dense and with experts (Yang et al. 2025)."""

from typing import Any

from spmd_tx.models.declared.model import Model
from spmd_tx.models.declared.plain import PlainSizes
from spmd_tx.models.families.keys import ConfigKeys
from spmd_tx.models.families.rope import read_rope


def dense(keys: ConfigKeys) -> Model:
    """Declare a Qwen3ForCausalLM."""
    return PlainSizes(**_sizes(keys), d_ff=keys.count("intermediate_size")).model()


def mixture(keys: ConfigKeys) -> Model:
    """Declare a Qwen3MoeForCausalLM, in which every layer has experts."""
    for key, every_layer in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if keys.get(key, every_layer) != every_layer:
            raise keys.wrong(
                key,
                ", so that only some layers have experts; supported are models in which all have "
                f"({key} {every_layer!r})",
            )
    experts, chosen = keys.experts()
    sizes = PlainSizes(
        **_sizes(keys),
        d_ff=keys.count("moe_intermediate_size"),
        n_experts=experts,
        experts_per_token=chosen,
        normalize_expert_weights=keys.flag("norm_topk_prob"),
    )
    return sizes.model()


def _sizes(keys: ConfigKeys) -> dict[str, Any]:
    keys.only(use_sliding_window=False, attention_bias=False, hidden_act="silu")
    keys.of_layers("layer_types", "full_attention")
    sizes = keys.sizes()
    rope = read_rope(keys, sizes["head_dim"])
    return sizes | {"rope": rope, "max_positions": rope.most_positions(sizes["max_positions"])}
