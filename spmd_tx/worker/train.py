"""The training steps: forward, forward_backward and optim_step, jitted once per batch shape.

Dimension key: B row (over all data shards), T token, D model width, V vocabulary, S slot.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from spmd_tx.models import head, lora
from spmd_tx.models.config import ModelConfig
from spmd_tx.models.layers import attend_segments
from spmd_tx.models.lora import Adapters, ApplyLora, Lora, row_lora
from spmd_tx.models.qwen3 import Pass, Weights, backbone
from spmd_tx.sharding.collectives import replicate_rows, sum_over_shards, unshard, varying
from spmd_tx.sharding.mesh import DATA, TP
from spmd_tx.sharding.weight import Weight, specs
from spmd_tx.worker.losses import TokenLossInputs, token_losses

HEAD_TOKENS = 1024  # tokens per data shard whose logits are held at once


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """protocol.PackedRows on the device."""

    tokens: Int[Array, "B T"]
    targets: Int[Array, "B T"]
    segments: Int[Array, "B T"]
    positions: Int[Array, "B T"]
    slots: Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that training changes, fp32, one entry per slot. Steps take it and return a new one."""

    w: Adapters[Any]
    grad_sum: Adapters[Any]  # since the last optim_step
    mu: Adapters[Any]
    nu: Adapters[Any]
    step: Any  # int32 [S]
    scale: Any  # float32 [S]: alpha / rank

    def with_gradient(self, grad_sum: Adapters[Any]) -> "TrainState":
        return replace(self, grad_sum=grad_sum)


def train_weights(model: ModelConfig, mesh: Mesh, slots: int, rank: int) -> TrainState:
    """Declare the state of ``slots`` adapters."""
    adapters = lora.adapter_weights(model, mesh, slots, rank, jnp.float32, zero=True)
    step, scale = (Weight((slots,), P(), dtype) for dtype in (jnp.int32, jnp.float32))
    return TrainState(adapters, adapters, adapters, adapters, step, scale)


def full_adapters(model: ModelConfig, adapters: Adapters[Array]) -> Adapters[Array]:
    """Gather what ZeRO stores split, and let every device have a gradient of its own."""
    tp = lax.axis_size(TP)

    def pair(name: str, factors: Lora[Array]) -> Lora[Array]:
        width_in, width_out = lora.widths(model)[name]
        if name in lora.ROW_PARALLEL:
            width_in //= tp
        elif not (name in ("k", "v") and model.n_kv_heads % tp):
            width_out //= tp
        return Lora(varying(unshard(factors.a, width_in)), varying(unshard(factors.b, width_out)))

    layers = {name: pair(name, factors) for name, factors in adapters.layers.items()}
    return Adapters(layers, pair("head", adapters.head))


def segment_attend(segments_BT: Array) -> Callable[..., tuple[Array, None]]:
    """Attention for packed rows without a cache."""

    def attend(_: Array, q: Array, k: Array, v: Array, cache: None) -> tuple[Array, None]:
        return attend_segments(q, k, v, segments_BT), cache

    return attend


def head_chunks(x_BT: Array) -> Array:
    """[B, T, ...] -> [chunks, B, T/chunks, ...], so that a chunk has about HEAD_TOKENS tokens."""
    b, t = x_BT.shape[:2]
    chunk = min(t, max(1, HEAD_TOKENS // b))
    while t % chunk:
        chunk -= 1
    return x_BT.reshape(b, t // chunk, chunk, *x_BT.shape[2:]).swapaxes(0, 1)


def unchunk(x: Array) -> Array:
    """The inverse of head_chunks."""
    x = x.swapaxes(0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def chunked_logprobs(unembed: Array, factors: Lora[Array], apply_lora: ApplyLora, h_BTD: Array, targets_BT: Array) -> Array:
    """Log-probabilities of the targets, float32 [B, T], without holding all logits."""

    def chunk(inputs: tuple[Array, Array]) -> Array:
        h, targets = inputs
        return head.target_logprobs(head.logits(unembed, factors, apply_lora, h), targets)

    return unchunk(lax.map(chunk, (head_chunks(h_BTD), head_chunks(targets_BT))))


def _chunked_inputs(loss: TokenLossInputs, chunks: int) -> TokenLossInputs:
    """Per-token inputs cut into chunks; per-row inputs repeated for each."""
    return jax.tree.map(
        lambda x: head_chunks(x) if x.shape[1] > 1 else jnp.broadcast_to(x, (chunks, *x.shape)), loss
    )


def head_loss_and_grad(
    unembed: Array, factors: Lora[Array], apply_lora: ApplyLora, h_BTD: Array, targets_BT: Array, loss: TokenLossInputs
) -> tuple[Array, Array, Array, Lora[Array]]:
    """One pass over the head: losses, logprobs, gradient of the hidden states, gradient of the head's adapter.

    Every loss is a sum over tokens, so a chunk of tokens can be differentiated as soon as its logits are there
    and the logits of all tokens are never held.
    """

    def chunk_loss(h: Array, factors: Lora[Array], targets: Array, inputs: TokenLossInputs) -> Any:
        logprobs = head.target_logprobs(head.logits(unembed, factors, apply_lora, h), targets)
        losses = token_losses(logprobs, inputs)
        return jnp.sum(losses), (losses, logprobs)

    def step(grad: Lora[Array], chunk: tuple[Array, Array, TokenLossInputs]) -> Any:
        h, targets, inputs = chunk
        differentiate = jax.value_and_grad(chunk_loss, argnums=(0, 1), has_aux=True)
        (_, (losses, logprobs)), (grad_h, grad_factors) = differentiate(h, factors, targets, inputs)
        return jax.tree.map(jnp.add, grad, grad_factors), (losses, logprobs, grad_h)

    hidden = head_chunks(h_BTD)
    chunks = (hidden, head_chunks(targets_BT), _chunked_inputs(loss, hidden.shape[0]))
    grad, (losses, logprobs, grad_h) = lax.scan(step, jax.tree.map(jnp.zeros_like, factors), chunks)
    return unchunk(losses), unchunk(logprobs), unchunk(grad_h), grad


def make_forward(model: ModelConfig, mesh: Mesh, base: Weights[Weight], state: TrainState) -> Callable[..., Any]:
    """(weights, w, scale, rows, loss) -> (logprobs, losses), float32 [B, T] on every process."""

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(specs(base), specs(state.w), P(), P(DATA), P(DATA)), out_specs=P())
    def forward(base: Weights[Array], w: Adapters[Array], scale: Array, rows: Rows, loss: TokenLossInputs) -> Any:
        adapters, apply_lora = full_adapters(model, w), row_lora(rows.slots, scale)
        how = Pass(segment_attend(rows.segments), apply_lora, sequence_parallel=True)
        h_BTD, _ = backbone(model, base, adapters, rows.tokens, rows.positions, how)
        logprobs = chunked_logprobs(base.unembed, adapters.head, apply_lora, h_BTD, rows.targets)
        return replicate_rows(logprobs), replicate_rows(token_losses(logprobs, loss))

    return forward


def make_forward_backward(model: ModelConfig, mesh: Mesh, base: Weights[Weight], state: TrainState) -> Callable[..., Any]:
    """(weights, w, grad_sum, scale, rows, loss) -> (grad_sum, logprobs, losses); ``grad_sum`` is donated."""
    in_specs = (specs(base), specs(state.w), specs(state.grad_sum), P(), P(DATA), P(DATA))

    @partial(jax.jit, donate_argnums=2)
    @partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=(specs(state.grad_sum), P(), P()))
    def forward_backward(
        base: Weights[Array], w: Adapters[Array], grad_sum: Adapters[Array], scale: Array, rows: Rows, loss: TokenLossInputs
    ) -> Any:
        apply_lora = row_lora(rows.slots, scale)
        how = Pass(segment_attend(rows.segments), apply_lora, sequence_parallel=True, remat=True)

        # The local loss is differentiated, not the global one: the gathers in full_adapters add the
        # devices' gradients up on the way back.
        def run(w: Adapters[Array]) -> tuple[Array, Lora[Array]]:
            adapters = full_adapters(model, w)
            return backbone(model, base, adapters, rows.tokens, rows.positions, how)[0], adapters.head

        (h_BTD, factors), pull_back = jax.vjp(run, w)
        losses, logprobs, grad_h, grad_head = head_loss_and_grad(
            base.unembed, factors, apply_lora, h_BTD, rows.targets, loss
        )
        (grad,) = pull_back((grad_h.astype(h_BTD.dtype), grad_head))
        return jax.tree.map(jnp.add, grad_sum, grad), replicate_rows(logprobs), replicate_rows(losses)

    return forward_backward


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdamWInputs:
    """Hyper-parameters of one step, float32 scalars."""

    learning_rate: Any
    beta1: Any
    beta2: Any
    eps: Any
    weight_decay: Any
    grad_clip_norm: Any  # 0 disables clipping


def take_slot(stack: Any, slot: Array) -> Any:
    """One slot of a tree of stacked leaves [..., S, R, X], without the slot axis."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, slot, x.ndim - 3, keepdims=False), stack)


def put_slot(stack: Any, one: Any, slot: Array) -> Any:
    """The stack with one slot replaced."""
    return jax.tree.map(
        lambda x, new: lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), slot, x.ndim - 3), stack, one
    )


def _all_finite(tree: Any) -> Array:
    bad = sum(sum_over_shards(jnp.sum(~jnp.isfinite(x), dtype=jnp.int32)) for x in jax.tree.leaves(tree))
    return jnp.equal(bad, 0)


def make_optim_step(mesh: Mesh, state: TrainState) -> Callable[..., Any]:
    """(state, slot, inputs) -> (state, gradient norm, applied); ``state`` is donated.

    AdamW with decoupled weight decay (Loshchilov and Hutter 2019), as torch.optim.AdamW: only the slot's
    own entries are read and written.
    """
    state_specs = specs(state)

    @partial(jax.jit, donate_argnums=0)
    @partial(jax.shard_map, mesh=mesh, in_specs=(state_specs, P(), P()), out_specs=(state_specs, P(), P()))
    def optim_step(state: TrainState, slot: Array, inputs: AdamWInputs) -> Any:
        w, grad, mu, nu = (take_slot(tree, slot) for tree in (state.w, state.grad_sum, state.mu, state.nu))
        norm = jnp.sqrt(sum(sum_over_shards(jnp.sum(jnp.square(x))) for x in jax.tree.leaves(grad)))
        is_clipped = (inputs.grad_clip_norm > 0) & (norm > inputs.grad_clip_norm)
        factor = jnp.where(is_clipped, inputs.grad_clip_norm / norm, 1.0)
        grad = jax.tree.map(lambda x: x * factor, grad)

        adam = optax.scale_by_adam(inputs.beta1, inputs.beta2, inputs.eps)
        moments = optax.ScaleByAdamState(state.step[slot], mu, nu)
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to the power of an int
            updates, moments = adam.update(grad, moments)
        new_w = jax.tree.map(
            lambda x, update: x - inputs.learning_rate * (update + inputs.weight_decay * x), w, updates
        )
        applied = jnp.isfinite(norm) & _all_finite((new_w, moments.mu, moments.nu))

        def choose(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda x, y: jnp.where(applied, x, y), new, old)

        step = state.step.at[slot].add(applied.astype(jnp.int32))
        zeros = jax.tree.map(jnp.zeros_like, grad)
        return (
            TrainState(
                w=put_slot(state.w, choose(new_w, w), slot),
                grad_sum=put_slot(state.grad_sum, zeros, slot),
                mu=put_slot(state.mu, choose(moments.mu, mu), slot),
                nu=put_slot(state.nu, choose(moments.nu, nu), slot),
                step=step,
                scale=state.scale,
            ),
            norm,
            applied,
        )

    return optim_step
