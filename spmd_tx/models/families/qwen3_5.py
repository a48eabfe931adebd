"""Qwen3.5, 3.6 and 3.8: layers of Gated DeltaNet (Yang et al. 2025), and every few layers one with attention.

Their checkpoints have a vision tower, and a layer that predicts one token more.
"""

from collections.abc import Callable

from spmd_tx.models.declared.channels import ExpertSources, Glu, Mixture
from spmd_tx.models.declared.delta_rule import DeltaRule
from spmd_tx.models.declared.layers import Channel, Layer, Mixer, in_cycles
from spmd_tx.models.declared.maps import TensorSource, linear
from spmd_tx.models.declared.model import Model
from spmd_tx.models.declared.mtp import MtpLayer
from spmd_tx.models.declared.route import Route
from spmd_tx.models.families.decoder import read_sizes
from spmd_tx.models.families.keys import MOST_LAYERS, ConfigKeys, Refusal
from spmd_tx.models.families.rope import read_rope
from spmd_tx.models.families.tower import read_tower, with_sections

LINEAR, FULL = "linear_attention", "full_attention"
INTERVAL = 4  # layers, of which the last one has attention
MTP_LAYER = "mtp.layers.0."
IGNORED = (r"mtp\..*", r"model\.visual\..*")


def dense(keys: ConfigKeys) -> Model:
    """Declare a Qwen3_5ForConditionalGeneration, or the text model of one."""
    return _model(keys, lambda text, _: Glu(text.count("intermediate_size")))


def mixture(keys: ConfigKeys) -> Model:
    """Declare a Qwen3_5MoeForConditionalGeneration, or the text model of one."""
    return _model(keys, _experts)


def _model(keys: ConfigKeys, channel: Callable[[ConfigKeys, str], Channel]) -> Model:
    text, is_inner = keys.text()
    prefix = "model.language_model." if is_inner else "model."
    sizes, at = read_sizes(text, is_zero_centred=True), f"{prefix}layers.{{layer}}."
    text.only(attention_bias=False, hidden_act="silu", attn_output_gate=True)
    text.only(mlp_only_layers=[], decoder_sparse_step=1)
    rope, tower = read_rope(text, sizes.head_width), read_tower(keys, sizes.d_model)
    if tower is not None:
        rope = with_sections(rope, text, sizes.head_width)
    attention = sizes.attention(rope, qk_norm=True, gate=True, is_zero_centred=True)
    mixers: dict[str, Mixer] = {LINEAR: _delta_rule(text), FULL: attention}
    layers = tuple(
        Layer(mixers[kind], channel(text, at), sizes.norm) for kind in _layer_types(text, sizes.n_layers)
    )
    return sizes.model(
        in_cycles(layers),
        rope,
        embed=TensorSource(f"{prefix}embed_tokens.weight"),
        final_norm=TensorSource(f"{prefix}norm.weight"),
        layer_prefix=at,
        ignored=IGNORED,
        mtp=_mtp(text, Layer(attention, channel(text, MTP_LAYER), sizes.norm)),
        tower=tower,
    )


def _mtp(text: ConfigKeys, layer: Layer) -> MtpLayer | None:
    """Declare the layer that predicts one token more, which has attention; None: there is none."""
    if not text.count_or("mtp_num_hidden_layers", 0, 0, MOST_LAYERS):
        return None
    if text.flag("mtp_use_dedicated_embeddings"):  # instead of the model's, and not read
        return None
    return MtpLayer(
        *(layer.mixer, layer.channel, layer.norm),
        at=MTP_LAYER,
        of_embedding="mtp.pre_fc_norm_embedding",
        of_hidden="mtp.pre_fc_norm_hidden",
        joins="mtp.fc",
        final="mtp.norm",
    )


def _layer_types(text: ConfigKeys, n_layers: int) -> list[str]:
    kinds = text.of_layers("layer_types", LINEAR, FULL)
    if kinds is None:
        interval = text.count_or("full_attention_interval", INTERVAL)
        kinds = [LINEAR if (number + 1) % interval else FULL for number in range(n_layers)]
    if len(set(kinds)) < 2:
        raise Refusal(
            f"has {n_layers} layers of {kinds[0]}; by layer_types or full_attention_interval there must be "
            f"{LINEAR} and {FULL}, some of each"
        )
    return kinds


def _delta_rule(text: ConfigKeys) -> DeltaRule:
    k_heads, v_heads = text.count("linear_num_key_heads"), text.count("linear_num_value_heads")
    taps = text.count("linear_conv_kernel_dim", least=2)
    if v_heads % k_heads:
        raise Refusal(
            f"has {v_heads} linear_num_value_heads, not a multiple of its {k_heads} linear_num_key_heads"
        )
    return DeltaRule(
        k_heads=k_heads,
        v_heads=v_heads,
        k_width=text.count("linear_key_head_dim"),
        v_width=text.count("linear_value_head_dim"),
        taps=taps,
        eps=text.number("rms_norm_eps"),
    )


def _experts(text: ConfigKeys, at: str) -> Mixture:
    experts, chosen = text.experts()
    width, fused = text.count("moe_intermediate_size"), f"{at}mlp.experts.gate_up_proj"
    gate_up = TensorSource(fused, transposed=True, stacked=True)
    return Mixture(
        experts=experts,
        chosen=chosen,
        width=width,
        route=Route("softmax", normalise=True),
        shared=Glu(
            text.count("shared_expert_intermediate_size"), module="mlp.shared_expert", prefix="shared_"
        ),
        shared_gate=linear(f"{at}mlp.shared_expert_gate"),
        sources=ExpertSources(
            gate_up.part(0, width),
            gate_up.part(width, 2 * width),
            TensorSource(f"{at}mlp.experts.down_proj", transposed=True, stacked=True),
        ),
    )
