"""Qwen3 (dense): the weights declared, the forward pass composed.

Written for the inside of shard_map. Training, prefill and decode run this same code; they differ in how
they attend and how they apply adapters, and hand both in.

Dimension key: B row, T token, D model width, H heads × head width, F feed-forward width, L layer,
V vocabulary, N heads, K key-value heads, E head width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from spmd_tx.models.config import ModelConfig
from spmd_tx.models.layers import embed, rms_norm, rotate, silu
from spmd_tx.models.lora import Adapters, ApplyLora, Lora
from spmd_tx.sharding.mesh import TP
from spmd_tx.sharding.weight import Weight

Leaf = TypeVar("Leaf")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LayerWeights(Generic[Leaf]):
    """The weights of all layers, stacked along the first dimension."""

    attention_norm: Leaf  # [L, D]
    q: Leaf  # [L, D, H]
    k: Leaf  # [L, D, K·E]
    v: Leaf
    o: Leaf  # [L, H, D]
    q_norm: Leaf  # [L, E]
    k_norm: Leaf
    mlp_norm: Leaf  # [L, D]
    gate: Leaf  # [L, D, F]
    up: Leaf
    down: Leaf  # [L, F, D]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weights(Generic[Leaf]):
    """The frozen base model."""

    embed: Leaf  # [V, D]
    layers: LayerWeights[Leaf]
    final_norm: Leaf  # [D]
    head: Leaf | None  # [V, D]; None: tied to embed

    @property
    def unembed(self) -> Leaf:
        """[V, D]"""
        return self.embed if self.head is None else self.head


def weights(model: ModelConfig, mesh: Mesh, dtype: DTypeLike) -> Weights[Weight]:
    """Declare the weights. With fewer key-value heads than tp, every device keeps all of them."""
    d, f, layers = model.d_model, model.d_ff, model.n_layers
    heads, kv_heads = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    kv_spec = P(None, None, None if model.n_kv_heads % mesh.shape[TP] else TP)

    def linear(width_in: int, width_out: int, spec: P, name: str) -> Weight:
        return Weight(
            (layers, width_in, width_out), spec, dtype, f"model.layers.{{layer}}.{name}.weight", True
        )

    def norm(width: int, name: str) -> Weight:
        return Weight((layers, width), P(), dtype, f"model.layers.{{layer}}.{name}.weight")

    columns, rows = P(None, None, TP), P(None, TP, None)
    return Weights(
        embed=Weight((model.vocab_size, d), P(TP, None), dtype, "model.embed_tokens.weight"),
        layers=LayerWeights(
            attention_norm=norm(d, "input_layernorm"),
            q=linear(d, heads, columns, "self_attn.q_proj"),
            k=linear(d, kv_heads, kv_spec, "self_attn.k_proj"),
            v=linear(d, kv_heads, kv_spec, "self_attn.v_proj"),
            o=linear(heads, d, rows, "self_attn.o_proj"),
            q_norm=norm(model.head_dim, "self_attn.q_norm"),
            k_norm=norm(model.head_dim, "self_attn.k_norm"),
            mlp_norm=norm(d, "post_attention_layernorm"),
            gate=linear(d, f, columns, "mlp.gate_proj"),
            up=linear(d, f, columns, "mlp.up_proj"),
            down=linear(f, d, rows, "mlp.down_proj"),
        ),
        final_norm=Weight((d,), P(), dtype, "model.norm.weight"),
        head=None
        if model.tied_embeddings
        else Weight((model.vocab_size, d), P(TP, None), dtype, "lm_head.weight"),
    )


# (layer, query [B,T,N,E], key [B,T,K,E], value [B,T,K,E], cache) -> (attended [B,T,N,E], cache)
Attend = Callable[[Array, Array, Array, Array, Any], tuple[Array, Any]]


@dataclass(frozen=True)
class Pass:
    """How one forward pass differs from the others."""

    attend: Attend
    apply_lora: ApplyLora
    sequence_parallel: bool  # split T over tp between the blocks (Korthikanti et al. 2022)
    remat: bool = False  # recompute a layer's activations on the way back

    def gather(self, x_BTD: Array) -> Array:
        return lax.all_gather(x_BTD, TP, axis=1, tiled=True) if self.sequence_parallel else x_BTD

    def reduce(self, partial_BTD: Array) -> Array:
        if self.sequence_parallel:
            return lax.psum_scatter(partial_BTD, TP, scatter_dimension=1, tiled=True)
        return lax.psum(partial_BTD, TP)


def backbone(
    model: ModelConfig,
    base: Weights[Array],
    adapters: Adapters[Array],
    tokens_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    how: Pass,
    cache: Any = None,
) -> tuple[Float[Array, "B T D"], Any]:
    """Hidden states after the final norm, all T of them on every device, and the updated cache."""

    def layer(
        carry: tuple[Array, Any], inputs: tuple[LayerWeights[Array], dict[str, Lora[Array]], Array]
    ) -> Any:
        x_BTD, cache = carry
        w, lora, index = inputs
        x_BTD, cache = attention(model, w, lora, x_BTD, positions_BT, how, index, cache)
        return (mlp(model, w, lora, x_BTD, how), cache), None

    if how.remat:
        layer = jax.checkpoint(layer, prevent_cse=False)  # scan already keeps the recomputation apart
    x_BTD = how.reduce(embed(base.embed, tokens_BT))
    xs = (base.layers, adapters.layers, jnp.arange(model.n_layers))
    (x_BTD, cache), _ = lax.scan(layer, (x_BTD, cache), xs)
    return how.gather(rms_norm(x_BTD, base.final_norm, model.rms_norm_eps)), cache


def attention(
    model: ModelConfig,
    w: LayerWeights[Array],
    lora: dict[str, Lora[Array]],
    x_BTD: Array,
    positions_BT: Array,
    how: Pass,
    index: Array,
    cache: Any,
) -> tuple[Array, Any]:
    """The attention block with its residual."""
    h_BTD = how.gather(rms_norm(x_BTD, w.attention_norm, model.rms_norm_eps))

    def heads(kernel: Array, name: str) -> Array:
        y = h_BTD @ kernel + how.apply_lora(h_BTD, lora[name])
        return y.reshape(*y.shape[:2], -1, model.head_dim)

    q_BTNE = rotate(rms_norm(heads(w.q, "q"), w.q_norm, model.rms_norm_eps), positions_BT, model.rope_theta)
    k_BTKE = rotate(rms_norm(heads(w.k, "k"), w.k_norm, model.rms_norm_eps), positions_BT, model.rope_theta)
    v_BTKE = heads(w.v, "v")
    tp = lax.axis_size(TP)
    if (
        model.n_kv_heads % tp
    ):  # every device holds all key-value heads and uses the one its query heads belong to
        mine = lax.axis_index(TP) * model.n_kv_heads // tp
        k_BTKE, v_BTKE = (lax.dynamic_slice_in_dim(x, mine, 1, axis=2) for x in (k_BTKE, v_BTKE))
    y_BTNE, cache = how.attend(index, q_BTNE, k_BTKE, v_BTKE, cache)
    y_BTH = y_BTNE.reshape(*y_BTNE.shape[:2], -1)
    return x_BTD + how.reduce(y_BTH @ w.o + how.apply_lora(y_BTH, lora["o"])), cache


def mlp(
    model: ModelConfig, w: LayerWeights[Array], lora: dict[str, Lora[Array]], x_BTD: Array, how: Pass
) -> Array:
    """The SwiGLU block (Shazeer 2020) with its residual."""
    h_BTD = how.gather(rms_norm(x_BTD, w.mlp_norm, model.rms_norm_eps))
    gate_BTF = silu(h_BTD @ w.gate + how.apply_lora(h_BTD, lora["gate"]))
    up_BTF = h_BTD @ w.up + how.apply_lora(h_BTD, lora["up"])
    y_BTF = gate_BTF * up_BTF
    return x_BTD + how.reduce(y_BTF @ w.down + how.apply_lora(y_BTF, lora["down"]))
