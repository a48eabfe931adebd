"""Qwen3-VL, dense and with experts (Qwen Team 2025): Qwen3's layers, of which the first ones add images."""

from dataclasses import replace

from spmd_tx.models.declared.channels import ExpertSources, Mixture
from spmd_tx.models.declared.layers import Cycle, Layer, Stack
from spmd_tx.models.declared.maps import TensorSource
from spmd_tx.models.declared.mixers import Softmax
from spmd_tx.models.declared.model import Model
from spmd_tx.models.families import qwen3
from spmd_tx.models.families.keys import ConfigKeys, Refusal
from spmd_tx.models.families.tower import read_tower, with_sections

INNER = "model.language_model."
LAYER = f"{INNER}layers.{{layer}}."
IGNORED = (r"model\.visual\..*",)


def dense(keys: ConfigKeys) -> Model:
    """Declare a Qwen3VLForConditionalGeneration."""
    return _seeing(keys, qwen3.dense(keys.text()[0]))


def mixture(keys: ConfigKeys) -> Model:
    """Declare a Qwen3VLMoeForConditionalGeneration, whose experts are stored together, the inputs first."""
    text = keys.text()[0]
    model, width = _seeing(keys, qwen3.mixture(text)), text.count("moe_intermediate_size")
    fused = TensorSource(f"{LAYER}mlp.experts.gate_up_proj", stacked=True)
    sources = ExpertSources(
        fused.part(0, width),
        fused.part(width, 2 * width),
        TensorSource(f"{LAYER}mlp.experts.down_proj", stacked=True),
    )

    def stored(layer: Layer) -> Layer:
        assert isinstance(layer.channel, Mixture)
        return replace(layer, channel=replace(layer.channel, sources=sources))

    stack = tuple(replace(cycle, layers=tuple(map(stored, cycle.layers))) for cycle in model.stack)
    return replace(model, stack=stack)


def _seeing(keys: ConfigKeys, model: Model) -> Model:
    """Return a Qwen3 as the text model of one with a tower."""
    text, is_inner = keys.text()
    if not is_inner:
        raise Refusal("lacks the key 'text_config'")
    tower = read_tower(keys, model.d_model, has_deep=True)
    (layer,) = model.stack[0].layers
    deep = 0
    if tower is not None:
        assert isinstance(layer.mixer, Softmax)
        assert layer.mixer.rope is not None
        rope = with_sections(layer.mixer.rope, text, layer.mixer.width)
        layer, deep = replace(layer, mixer=replace(layer.mixer, rope=rope)), len(tower.deep)
    if deep > model.n_layers:
        raise Refusal(f"has {deep} deepstack_visual_indexes, more than its {model.n_layers} layers")
    return replace(
        model,
        stack=_stack(layer, deep, model.n_layers - deep),
        embed=TensorSource(f"{INNER}embed_tokens.weight"),
        final_norm=TensorSource(f"{INNER}norm.weight"),
        layer_prefix=LAYER,
        ignored=IGNORED,
        tower=tower,
    )


def _stack(layer: Layer, deep: int, others: int) -> Stack:
    kinds = ((replace(layer, adds_image=True), deep), (layer, others))
    return tuple(Cycle((each,), count) for each, count in kinds if count)
