"""DeepSeek-V3 (DeepSeek-AI 2024), and what later families have of it: router, shared expert, dense layers."""

import re

from spmd_tx.models.declared.channels import Glu, Mixture
from spmd_tx.models.declared.latent import Latent
from spmd_tx.models.declared.layers import Channel, Cycle, Layer, Mixer, Norm, Stack
from spmd_tx.models.declared.maps import TensorSource
from spmd_tx.models.declared.model import LAYER, LM_HEAD, Model
from spmd_tx.models.declared.mtp import JOINS, MtpLayer
from spmd_tx.models.declared.route import Route
from spmd_tx.models.families.keys import MOST_LAYERS, ConfigKeys, Refusal
from spmd_tx.models.families.rope import read_rope

FURTHER = ("num_nextn_predict_layers", "num_mtp_layers")
INNER = "language_model."  # with which the names of a text model's tensors begin beside a vision tower
VISION = (r"vision_tower\..*", r"mm_projector\..*")


def latent(keys: ConfigKeys) -> Model:
    """Declare a DeepseekV3ForCausalLM, a Glm4MoeLiteForCausalLM, or the text model of a Kimi-K2.5."""
    keys, is_inner = keys.text()
    prefix = INNER if is_inner else ""
    keys.only(hidden_act="silu")
    norm, width = Norm(keys.number("rms_norm_eps")), keys.count("qk_rope_head_dim")
    rope = read_rope(keys, width, rotated=width, is_interleaved=keys.flag("rope_interleave", True))
    mixer = Latent(
        heads=keys.count("num_attention_heads"),
        q_rank=keys.count_or("q_lora_rank", 0, least=0),
        kv_rank=keys.count("kv_lora_rank"),
        nope=keys.count("qk_nope_head_dim"),
        rope_width=width,
        value=keys.count("v_head_dim"),
        rope=rope,
        biases=keys.flag("attention_bias"),
    )
    return Model(
        architecture=keys.raw["architectures"][0],
        vocab_size=keys.count("vocab_size"),
        d_model=keys.count("hidden_size"),
        stack=stack(keys, mixer, norm, prefix),
        norm=norm,
        max_positions=rope.most_positions(keys.count("max_position_embeddings")),
        embed=TensorSource(f"{prefix}model.embed_tokens.weight"),
        final_norm=TensorSource(f"{prefix}model.norm.weight"),
        head=TensorSource(f"{prefix}{LM_HEAD.name}"),
        is_tied=keys.flag("tie_word_embeddings"),
        layer_prefix=f"{prefix}{LAYER}",
        ignored=VISION if prefix else (),
        further=further(keys, prefix),
        mtp=mtp(keys, mixer, norm, prefix),
    )


def mixture(keys: ConfigKeys, at: str) -> Mixture:
    """Declare the mixture of a layer: experts chosen by corrected sigmoids, and one that every token has.

    ``at`` begins the names of the layer's tensors.
    """
    experts, chosen = keys.count("n_routed_experts"), keys.count("num_experts_per_tok")
    width = keys.count("moe_intermediate_size")
    shared = keys.count_or("n_shared_experts", 0, least=0)
    keys.only(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    route = Route(
        "sigmoid",
        normalise=keys.flag("norm_topk_prob", True),
        groups=keys.count_or("n_group", 1),
        kept_groups=keys.count_or("topk_group", 1),
        factor=keys.number("routed_scaling_factor", 1.0),
    )
    if problem := route.problem(experts, chosen):
        raise Refusal(problem)
    return Mixture(
        experts,
        chosen,
        width,
        route,
        shared=Glu(shared * width, module="mlp.shared_experts", prefix="shared_") if shared else None,
        correction=TensorSource(f"{at}mlp.gate.e_score_correction_bias"),
    )


def stack(keys: ConfigKeys, mixer: Mixer, norm: Norm, prefix: str = "") -> Stack:
    """Declare the layers: the first ones are dense, the others have experts."""
    n_layers, dense = keys.layers(), _dense_layers(keys)
    kinds: tuple[tuple[int, Channel], ...] = (
        (dense, Glu(keys.count("intermediate_size"))),
        (n_layers - dense, mixture(keys, f"{prefix}{LAYER}")),
    )
    return tuple(Cycle((Layer(mixer, channel, norm),), count) for count, channel in kinds if count)


def _dense_layers(keys: ConfigKeys) -> int:
    n_layers, kinds = keys.layers(), keys.of_layers("mlp_layer_types", "dense", "sparse")
    if kinds is None:
        return min(n_layers, keys.count_or("first_k_dense_replace", 0, least=0))
    dense = kinds.count("dense")
    if "dense" in kinds[dense:]:
        raise keys.wrong("mlp_layer_types", "; supported are dense layers before sparse ones")
    return dense


def further(keys: ConfigKeys, prefix: str = "") -> tuple[str, ...]:
    """Return the places behind the last layer where those that predict further tokens may be."""
    count = max(1, *(keys.count_or(key, 0, 0, MOST_LAYERS) for key in FURTHER))
    return tuple(f"{prefix}{LAYER.format(layer=keys.layers() + number)}" for number in range(count))


def mtp(keys: ConfigKeys, mixer: Mixer, norm: Norm, prefix: str = "") -> MtpLayer | None:
    """Declare the first of those layers; None: config.json says that there is none."""
    if not any(keys.count_or(key, 0, 0, MOST_LAYERS) for key in FURTHER):
        return None
    at = f"{prefix}{LAYER.format(layer=keys.layers())}"
    return MtpLayer(
        *(mixer, mixture(keys, at), norm),
        at=at,
        of_embedding=f"{at}enorm",
        of_hidden=f"{at}hnorm",
        joins=f"{at}{JOINS}",
        final=f"{at}shared_head.norm",
        copies=tuple(re.escape(f"{at}{name}.weight") for name in ("embed_tokens", "shared_head.head")),
    )
