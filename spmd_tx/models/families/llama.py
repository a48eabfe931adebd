"""Llama 3 (Dubey et al. 2024), and Mistral, Ministral 3, Qwen2 and SmolLM3, which differ from it little."""

from dataclasses import replace

from spmd_tx.models.declared.channels import Glu
from spmd_tx.models.declared.layers import Layer, in_cycles
from spmd_tx.models.declared.maps import TensorSource
from spmd_tx.models.declared.mixers import Softmax
from spmd_tx.models.declared.model import Model
from spmd_tx.models.families.decoder import read_sizes
from spmd_tx.models.families.keys import ConfigKeys, Refusal
from spmd_tx.models.families.rope import read_rope

FIRST_THETA = 10000.0  # of the first checkpoints, which do not say so
INNER = "language_model."  # with which the names of a text model's tensors begin beside a vision tower
VISION = (r"vision_tower\..*", r"multi_modal_projector\..*")
SMOLLM3 = {"rope_theta": 2e6, "tie_word_embeddings": True}  # where a checkpoint does not say so


def llama(keys: ConfigKeys) -> Model:
    """Declare a LlamaForCausalLM."""
    biases = ("q", "k", "v", "o") if keys.flag("attention_bias") else ()
    return _model(keys, biases, has_mlp_bias=keys.flag("mlp_bias"))


def mistral(keys: ConfigKeys) -> Model:
    """Declare a MistralForCausalLM, a Ministral3ForCausalLM, or the text model of a model with vision.

    A model in which tokens see a window is served up to its length, where the window makes no difference.
    """
    text, is_inner = keys.text()
    model = _model(text, window=text.count_or("sliding_window", 0, least=0))
    if not is_inner:
        return model
    embed, final_norm = (TensorSource(f"{INNER}{each.name}") for each in (model.embed, model.final_norm))
    return replace(
        model,
        embed=embed,
        final_norm=final_norm,
        head=TensorSource(f"{INNER}{model.head.name}"),
        layer_prefix=f"{INNER}{model.layer_prefix}",
        ignored=VISION,
    )


def qwen2(keys: ConfigKeys) -> Model:
    """Declare a Qwen2ForCausalLM."""
    keys.only(use_sliding_window=False)
    keys.of_layers("layer_types", "full_attention")
    return _model(keys, ("q", "k", "v"))


def smollm3(keys: ConfigKeys) -> Model:
    """Declare a SmolLM3ForCausalLM, in which every few layers have no positions (Yang et al. 2025)."""
    keys = keys.with_defaults(**SMOLLM3)
    keys.only(use_sliding_window=False)
    keys.of_layers("layer_types", "full_attention")
    model = llama(keys)
    rotated = keys.of_layers("no_rope_layers", 0, 1)
    if rotated is None:
        interval = keys.count_or("no_rope_layer_interval", 4)
        rotated = [(number + 1) % interval for number in range(model.n_layers)]
    if not rotated[0]:
        raise Refusal("has no positions in its first layer, by no_rope_layers or no_rope_layer_interval")
    (layer,) = model.stack[0].layers
    assert isinstance(layer.mixer, Softmax)
    plain = replace(layer, mixer=replace(layer.mixer, rope=None))
    return replace(model, stack=in_cycles(tuple(layer if has else plain for has in rotated)))


def _model(
    keys: ConfigKeys, biases: tuple[str, ...] = (), *, has_mlp_bias: bool = False, window: int = 0
) -> Model:
    keys = keys.with_defaults(rope_theta=FIRST_THETA)
    keys.only(hidden_act="silu")
    sizes = read_sizes(keys)
    rope = read_rope(keys, sizes.head_width)
    channel = Glu(keys.count("intermediate_size"), has_bias=has_mlp_bias)
    model = sizes.model(Layer(sizes.attention(rope, biases=biases), channel, sizes.norm), rope)
    return replace(model, max_positions=min(model.max_positions, window or model.max_positions))
