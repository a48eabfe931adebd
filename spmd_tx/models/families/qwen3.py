"""Qwen3, dense and with experts (Yang et al. 2025)."""

from spmd_tx.models.declared.channels import Glu, Mixture
from spmd_tx.models.declared.layers import Channel, Layer
from spmd_tx.models.declared.model import Model
from spmd_tx.models.declared.route import Route
from spmd_tx.models.families.decoder import read_sizes
from spmd_tx.models.families.keys import ConfigKeys
from spmd_tx.models.families.rope import read_rope


def dense(keys: ConfigKeys) -> Model:
    """Declare a Qwen3ForCausalLM."""
    return _model(keys, Glu(keys.count("intermediate_size")))


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
    route = Route("softmax", normalise=keys.flag("norm_topk_prob"))
    return _model(keys, Mixture(experts, chosen, keys.count("moe_intermediate_size"), route))


def _model(keys: ConfigKeys, channel: Channel) -> Model:
    keys.only(use_sliding_window=False, attention_bias=False, hidden_act="silu")
    keys.of_layers("layer_types", "full_attention")
    sizes = read_sizes(keys)
    rope = read_rope(keys, sizes.head_width)
    return sizes.model(Layer(sizes.attention(rope, qk_norm=True), channel, sizes.norm), rope)
