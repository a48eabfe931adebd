"""Qwen3, dense and with experts: the declared weights and the forward pass.

Runs inside shard_map. Training, prefill and decode share this code; they pass in how to attend and how to
apply adapters.

Dimension key: B row, T token, D model width, H heads × head width, F feed-forward width, L layer,
V vocabulary, N heads, K key-value heads, E head width, X expert, C choice of an expert.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax.struct import PyTreeNode
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from spmd_tx.models import moe
from spmd_tx.models.attention import saves_attention
from spmd_tx.models.config import ModelConfig
from spmd_tx.models.forward_pass import Pass
from spmd_tx.models.layers import embed, rms_norm, rotate, silu
from spmd_tx.models.lora import Adapters, Lora
from spmd_tx.sharding.mesh import EP, FSDP, TP, AnyMesh
from spmd_tx.sharding.weight import Weight

Leaf = TypeVar("Leaf")


class LayerWeights(PyTreeNode, Generic[Leaf]):
    """Holds the weights of all layers, stacked along the first dimension."""

    attention_norm: Leaf  # [L, D]
    q: Leaf  # [L, D, H]
    k: Leaf  # [L, D, K·E]
    v: Leaf
    o: Leaf  # [L, H, D]
    q_norm: Leaf  # [L, E]
    k_norm: Leaf
    mlp_norm: Leaf  # [L, D]
    gate: Leaf  # [L, D, F], or with experts [L, X, D, F]
    up: Leaf
    down: Leaf  # [L, F, D], or with experts [L, X, F, D]
    router: Leaf | None  # [L, D, X]; None: no experts


class Weights(PyTreeNode, Generic[Leaf]):
    """Holds the frozen base model."""

    embed: Leaf  # [V, D]
    layers: LayerWeights[Leaf]
    final_norm: Leaf  # [D]
    head: Leaf | None  # [V, D]; None: tied to embed

    @property
    def unembed(self) -> Leaf:
        """[V, D]"""
        return self.embed if self.head is None else self.head


def weights(
    model: ModelConfig, mesh: AnyMesh, dtype: DTypeLike, *, split_over_fsdp: bool = False
) -> Weights[Weight]:
    """Declare the weights. With fewer key-value heads than tp, every device keeps all of them."""
    d, f, layers = model.d_model, model.d_ff, model.n_layers
    heads, kv_heads = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    fsdp = FSDP if split_over_fsdp else None
    columns, rows, vocabulary = P(None, fsdp, TP), P(None, TP, fsdp), P(TP, fsdp)
    kv_columns = P(None, fsdp, None if model.n_kv_heads % mesh.shape[TP] else TP)

    def linear(width_in: int, width_out: int, spec: P, name: str) -> Weight:
        return Weight(
            (layers, width_in, width_out), spec, dtype, f"model.layers.{{layer}}.{name}.weight", True
        )

    def feed_forward(width_in: int, width_out: int, spec: P, name: str) -> Weight:
        if not model.n_experts:
            return linear(width_in, width_out, spec, f"mlp.{name}")
        shape = (layers, model.n_experts, width_in, width_out)
        hf_name = f"model.layers.{{layer}}.mlp.experts.{{expert}}.{name}.weight"
        return Weight(shape, P(None, EP, *spec[1:]), dtype, hf_name, True)

    def norm(width: int, name: str) -> Weight:
        return Weight((layers, width), P(), dtype, f"model.layers.{{layer}}.{name}.weight")

    return Weights(
        embed=Weight((model.vocab_size, d), vocabulary, dtype, "model.embed_tokens.weight"),
        layers=LayerWeights(
            attention_norm=norm(d, "input_layernorm"),
            q=linear(d, heads, columns, "self_attn.q_proj"),
            k=linear(d, kv_heads, kv_columns, "self_attn.k_proj"),
            v=linear(d, kv_heads, kv_columns, "self_attn.v_proj"),
            o=linear(heads, d, rows, "self_attn.o_proj"),
            q_norm=norm(model.head_dim, "self_attn.q_norm"),
            k_norm=norm(model.head_dim, "self_attn.k_norm"),
            mlp_norm=norm(d, "post_attention_layernorm"),
            gate=feed_forward(d, f, columns, "gate_proj"),
            up=feed_forward(d, f, columns, "up_proj"),
            down=feed_forward(f, d, rows, "down_proj"),
            router=linear(d, model.n_experts, P(), "mlp.gate") if model.n_experts else None,
        ),
        final_norm=Weight((d,), P(), dtype, "model.norm.weight"),
        head=None
        if model.tied_embeddings
        else Weight((model.vocab_size, d), vocabulary, dtype, "lm_head.weight"),
    )


# What each level keeps of a layer for the backward pass, besides its input; the rest is recomputed. "mlp"
# keeps attention's operands and results, so the feed-forward block runs twice; "light" recomputes
# elementwise operations only; "none" keeps everything that the backward pass reads.
# "attended" is named in blockwise_attention.py, "low_rank" in lora.py.
ATTENTION_NAMES = ("query", "key", "value", "attended", "after_attention", "low_rank")
REMAT_LEVELS: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "light": (*ATTENTION_NAMES, "gate", "up"),
    "mlp": ATTENTION_NAMES,
    "full": (),
}


def rematerialised(run: Callable[..., Any], level: str) -> Callable[..., Any]:
    """Wrap one layer so that it keeps what a level of REMAT_LEVELS says."""
    names = REMAT_LEVELS[level]
    if names is None:
        return run
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    if names:
        policy = jax.checkpoint_policies.save_from_both_policies(policy, saves_attention)
    return jax.checkpoint(run, prevent_cse=False, policy=policy)  # scan already keeps the two passes apart


@dataclass(frozen=True)
class _Layer:
    """Holds the weights and adapters of one layer, and the pass that runs it."""

    model: ModelConfig
    w: LayerWeights[Array]
    lora: dict[str, Lora[Array]]
    how: Pass

    def linear(self, x: Array, name: str, kernel: Array, width_out: int) -> Array:
        return self.how.linear(x, kernel, width_out) + self.how.apply_lora(x, self.lora[name])


def backbone(
    model: ModelConfig,
    base: Weights[Array],
    adapters: Adapters[Array],
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    how: Pass,
    cache: Any = None,
) -> tuple[Float[Array, "B T D"], Any, Int[Array, "B T L C"] | None]:
    """Return hidden states after the final norm (all T on every device), cache and chosen experts."""

    def run(carry: tuple[Array, Any], inputs: tuple[Any, dict[str, Lora[Array]], Array, Any]) -> Any:
        x_BTD, cache = carry
        w, lora, index, replayed_BTC = inputs
        layer = _Layer(model, w, lora, how)
        x_BTD, cache = attention(layer, x_BTD, positions_BT, index, cache)
        x_BTD, choices_BTC = feed_forward(layer, x_BTD, replayed_BTC)
        return (x_BTD, cache), choices_BTC

    if how.remat is not None:
        run = rematerialised(run, how.remat)
    x_BTD = how.reduce(embed(base.embed, tokens_BT, model.d_model))
    replayed_LBTC = None if how.experts is None else jnp.moveaxis(how.experts, 2, 0)
    xs = (base.layers, adapters.layers, jnp.arange(model.n_layers), replayed_LBTC)
    (x_BTD, cache), choices_LBTC = lax.scan(run, (x_BTD, cache), xs)
    choices_BTLC = None if choices_LBTC is None else jnp.moveaxis(choices_LBTC, 0, 2)
    h_BTD = how.gather(rms_norm(x_BTD, base.final_norm, model.rms_norm_eps))
    return h_BTD, cache, choices_BTLC


def attention(
    layer: _Layer, x_BTD: Array, positions_BT: Array, index: Array, cache: Any
) -> tuple[Array, Any]:
    """Run the attention block with its residual."""
    model, w, how, tp = layer.model, layer.w, layer.how, lax.axis_size(TP)
    eps, theta = model.rms_norm_eps, model.rope_theta
    h_BTD = how.gather(rms_norm(x_BTD, w.attention_norm, eps))

    def heads(name: str, kernel: Array) -> Array:
        y = layer.linear(h_BTD, name, kernel, kernel.shape[1])
        return y.reshape(*y.shape[:2], -1, model.head_dim)

    q_BTNE = rotate(rms_norm(heads("q", w.q), w.q_norm, eps), positions_BT, theta)
    k_BTKE = rotate(rms_norm(heads("k", w.k), w.k_norm, eps), positions_BT, theta)
    v_BTKE = heads("v", w.v)
    if model.n_kv_heads % tp:  # every device holds all key-value heads and uses that of its query heads
        mine = lax.axis_index(TP) * model.n_kv_heads // tp
        k_BTKE, v_BTKE = (lax.dynamic_slice_in_dim(x, mine, 1, axis=2) for x in (k_BTKE, v_BTKE))
    q_BTNE, k_BTKE = checkpoint_name(q_BTNE, "query"), checkpoint_name(k_BTKE, "key")
    y_BTNE, cache = how.attend(index, q_BTNE, k_BTKE, checkpoint_name(v_BTKE, "value"), cache)
    y_BTH = y_BTNE.reshape(*y_BTNE.shape[:2], -1)
    x_BTD = x_BTD + how.reduce(layer.linear(y_BTH, "o", w.o, model.d_model))
    return checkpoint_name(x_BTD, "after_attention"), cache


def feed_forward(layer: _Layer, x_BTD: Array, replayed_BTC: Array | None) -> tuple[Array, Array | None]:
    """Run the SwiGLU block (Shazeer 2020), or a mixture, with its residual; return chosen experts, too."""
    model, w, how = layer.model, layer.w, layer.how
    h_BTD = how.gather(rms_norm(x_BTD, w.mlp_norm, model.rms_norm_eps))
    if w.router is not None:
        choices_BTC, gates_BTX = moe.route(model, w.router, h_BTD, replayed_BTC)
        kernels = {"gate": w.gate, "up": w.up, "down": w.down}
        y_BTD = moe.mixture(kernels, layer.lora, h_BTD, (choices_BTC, gates_BTX), how)
        return x_BTD + how.reduce(y_BTD), choices_BTC
    gate_BTF = silu(checkpoint_name(layer.linear(h_BTD, "gate", w.gate, w.gate.shape[1]), "gate"))
    up_BTF = checkpoint_name(layer.linear(h_BTD, "up", w.up, w.up.shape[1]), "up")
    return x_BTD + how.reduce(layer.linear(gate_BTF * up_BTF, "down", w.down, model.d_model)), None
