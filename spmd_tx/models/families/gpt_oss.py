"""gpt-oss (OpenAI 2025): attention with sinks, windows in every second layer, and experts with biases."""

from spmd_tx.models.declared.channels import ExpertSources, Mixture
from spmd_tx.models.declared.encoding import Mxfp4
from spmd_tx.models.declared.layers import Layer, in_cycles
from spmd_tx.models.declared.maps import TensorSource
from spmd_tx.models.declared.model import LAYER, Model
from spmd_tx.models.declared.route import Route
from spmd_tx.models.families.decoder import read_sizes
from spmd_tx.models.families.keys import ConfigKeys
from spmd_tx.models.families.rope import read_rope

EXPERTS, ROUTER = f"{LAYER}mlp.experts.", f"{LAYER}mlp.router.bias"
SLIDING, FULL = "sliding_attention", "full_attention"
CLAMP = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # those of activations.clamped_swiglu


def mixture(keys: ConfigKeys) -> Model:
    """Declare a GptOssForCausalLM, with its experts in MXFP4 or as they are."""
    keys.only(hidden_act="silu", **CLAMP)
    quantization = keys.within("quantization_config")
    if quantization.get("quant_method", "mxfp4") != "mxfp4":
        raise quantization.wrong("quant_method", "; of gpt-oss only mxfp4 and bfloat16 are read")
    sizes = read_sizes(keys)
    rope = read_rope(keys, sizes.head_width)
    experts, chosen = keys.experts()
    width = keys.count("intermediate_size")
    channel = Mixture(
        experts,
        chosen,
        width,
        Route("softmax", chosen_first=True),
        activation="clamped_swiglu",
        sources=_experts(width, is_packed=bool(quantization.raw)),
        router="router",
        router_bias=TensorSource(ROUTER),
    )

    def layer(kind: str) -> Layer:
        window = keys.count("sliding_window") if kind == SLIDING else 0
        biases = ("q", "k", "v", "o") if keys.flag("attention_bias", True) else ()
        mixer = sizes.attention(rope, window=window, sinks=True, biases=biases)
        return Layer(mixer, channel, sizes.norm)

    return sizes.model(in_cycles(tuple(map(layer, _kinds(keys)))), rope)


def _kinds(keys: ConfigKeys) -> list[str]:
    n_layers = keys.layers()
    kinds = keys.of_layers("layer_types", SLIDING, FULL) or ([SLIDING, FULL] * n_layers)[:n_layers]
    if FULL not in kinds:
        raise keys.wrong("layer_types", f"; at least one layer must be {FULL}")
    return kinds


def _experts(width: int, *, is_packed: bool) -> ExpertSources:
    """Return where the experts are: gate and up in turns, as [out, in] if they are packed, else [in, out]."""
    encoding = Mxfp4() if is_packed else None
    both = TensorSource(f"{EXPERTS}gate_up_proj", transposed=is_packed, stacked=True, encoding=encoding)
    biases = TensorSource(f"{EXPERTS}gate_up_proj_bias", stacked=True)
    return ExpertSources(
        gate=both.every(2, 0, 2 * width),
        up=both.every(2, 1, 2 * width),
        down=TensorSource(f"{EXPERTS}down_proj", transposed=is_packed, stacked=True, encoding=encoding),
        gate_bias=biases.every(2, 0, 2 * width),
        up_bias=biases.every(2, 1, 2 * width),
        down_bias=TensorSource(f"{EXPERTS}down_proj_bias", stacked=True),
    )
