"""The training steps: forward and forward_backward, jitted once per batch shape.

The arrays of a batch and their dimensions select the program: several targets per position are [B, T, K],
and a loss over whole sequences takes two passes over the head.
Dimension key: B row (over all data shards), T token, K target, D model width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmd_tx.models import head
from spmd_tx.models.adapters import lora
from spmd_tx.models.adapters.lora import Adapters, ApplyLora, ExpertAdapters, Lora, expert_adapters
from spmd_tx.models.adapters.row_lora import StoredLora, row_lora, take_rows, whole
from spmd_tx.models.attention.packed_rows import segment_attention
from spmd_tx.models.backbone import backbone
from spmd_tx.models.base_weights import Weights
from spmd_tx.models.declared.model import Model
from spmd_tx.models.experts import moe
from spmd_tx.models.forward_pass import Pass
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.collectives import replicate_rows, varying
from spmd_tx.sharding.mesh import DATA, TP
from spmd_tx.sharding.tree_node import TreeNode
from spmd_tx.sharding.weight import Weight, specs
from spmd_tx.worker.steps.losses import TokenLossInputs, sequence_losses, token_losses
from spmd_tx.worker.steps.train_state import TrainState, active_slots, add_to_slots, take_slots

HEAD_TOKENS = 1024  # tokens per data shard whose logits are held at once


class Rows(TreeNode):
    """Holds PackedRows (protocol/commands.py) on the device."""

    tokens: Any  # int32 [B, T]
    targets: Any  # int32 [B, T] or [B, T, K]
    segments: Any  # int32 [B, T]
    positions: Any  # int32 [B, T]
    slots: Any  # int32 [B]
    experts: Any = None  # int16 [B, T, L, k] for a mixture of experts; -1: the router chooses
    # int32 [B], of prompts: the slots in which a row's state is found and left. None: models without states
    state_sources: Any = None
    state_targets: Any = None
    places: Any = None  # int32 [B, T, 3]: time, row and column. None: there are no images


def both_loras(
    apply: Callable[[Array, Array], ApplyLora], slots_B: Array, scale_S2: Array
) -> tuple[ApplyLora, ExpertAdapters]:
    """Return how adapters apply to this device's rows, and in experts to the rows of all devices of ep."""
    slots_R = moe.gather_rows(slots_B)
    return apply(slots_B, scale_S2[:, 0]), expert_adapters(apply, slots_B, slots_R, scale_S2[:, 1])


def own_adapters(model: Model, adapters: Adapters[Array]) -> Adapters[Array]:
    """Let every device have its own gradient. Layers gather what ZeRO stores split; the head is gathered."""
    tp = lax.axis_size(TP)

    def pair(name: str, factors: Lora[Array]) -> StoredLora:
        return StoredLora(varying(factors.a), varying(factors.b), *lora.local_widths(model, name, tp))

    layers = {name: pair(name, factors) for name, factors in adapters.layers.items()}
    return Adapters({**layers}, whole(pair("head", adapters.head)))


def segment_attend(kernels: Kernels, segments_BT: Array) -> Callable[..., tuple[Array, None]]:
    """Return attention for packed rows without a cache."""
    attention = segment_attention(kernels, segments_BT)

    def attend(_: Array, q: Array, k: Array, v: Array, cache: None, **sight: Any) -> tuple[Array, None]:
        return attention(q, k, v, **sight), cache

    return attend


def head_chunks(x_BT: Array) -> Array:
    """Cut [B, T, ...] into [chunks, B, T/chunks, ...], with about HEAD_TOKENS tokens per chunk."""
    b, t = x_BT.shape[:2]
    chunk = min(t, max(1, HEAD_TOKENS // b))
    while t % chunk:
        chunk -= 1
    return x_BT.reshape(b, t // chunk, chunk, *x_BT.shape[2:]).swapaxes(0, 1)


def unchunk(x: Array) -> Array:
    """Undo head_chunks."""
    x = x.swapaxes(0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


# (what is trained of the head, hidden states [B, T, D]) -> logits [B, T, V], float32.
Logits = Callable[[Any, Array], Array]


def adapted_logits(unembed: Array, apply_lora: ApplyLora) -> Logits:
    """Return the logits of a frozen head, of which an adapter's factors are trained."""
    return lambda factors, h_BTD: head.logits(unembed, factors, apply_lora, h_BTD)


def chunked_logprobs(logits: Callable[[Array], Array], h_BTD: Array, targets: Array) -> Array:
    """Return log-probabilities of the targets, float32, without holding all logits."""

    def chunk(inputs: tuple[Array, Array]) -> Array:
        h, targets = inputs
        return head.target_logprobs(logits(h), targets)

    return unchunk(lax.map(chunk, (head_chunks(h_BTD), head_chunks(targets))))


def _chunked_inputs(inputs: Any, chunks: int) -> Any:
    """Cut per-token inputs into chunks, and repeat per-row inputs for each."""
    return jax.tree.map(
        lambda x: head_chunks(x) if x.shape[1] > 1 else jnp.broadcast_to(x, (chunks, *x.shape)), inputs
    )


def head_loss_and_grad(
    logits: Logits,
    trained: Any,
    h_BTD: Array,
    targets: Array,
    token_loss: Callable[[Array, Any], Array],
    inputs: Any,
) -> tuple[Array, Array, Array, Any]:
    """Return losses, logprobs, and gradients of the hidden states and of what is trained, in one pass.

    ``token_loss`` computes losses [B, T] from log-probabilities and ``inputs``, each token's from its own. So
    each chunk of tokens is differentiated right after its logits are computed, and the logits of all tokens
    are never held.
    """

    def chunk_loss(h: Array, trained: Any, targets: Array, inputs: Any) -> Any:
        logprobs = head.target_logprobs(logits(trained, h), targets)
        losses = token_loss(logprobs, inputs)
        return jnp.sum(losses), (losses, logprobs)

    def step(grad: Any, chunk: tuple[Array, Array, Any]) -> Any:
        h, targets, inputs = chunk
        differentiate = jax.value_and_grad(chunk_loss, argnums=(0, 1), has_aux=True)
        (_, (losses, logprobs)), (grad_h, grad_trained) = differentiate(h, trained, targets, inputs)
        return jax.tree.map(jnp.add, grad, grad_trained), (losses, logprobs, grad_h)

    hidden = head_chunks(h_BTD)
    chunks = (hidden, head_chunks(targets), _chunked_inputs(inputs, hidden.shape[0]))
    grad, (losses, logprobs, grad_h) = lax.scan(step, jax.tree.map(jnp.zeros_like, trained), chunks)
    return unchunk(losses), unchunk(logprobs), unchunk(grad_h), grad


def sequence_loss_and_grad(
    logits: Logits,
    trained: Any,
    h_BTD: Array,
    rows: Rows,
    loss: Callable[[Array], Array],
) -> tuple[Array, Array, Array, Any]:
    """Return the same in two passes, for a loss that needs the log-probabilities [B, T] of whole rows.

    The first pass computes those. The derivatives of the loss with respect to them are the tokens' weights
    in the second pass.
    """
    logprobs = chunked_logprobs(partial(logits, trained), h_BTD, rows.targets)
    losses, pull_back = jax.vjp(loss, logprobs)
    (slopes_BT,) = pull_back(jnp.ones_like(losses))
    _, _, grad_h, grad = head_loss_and_grad(logits, trained, h_BTD, rows.targets, jnp.multiply, slopes_BT)
    return losses, logprobs, grad_h, grad


def logprobs_and_losses(
    logits: Callable[[Array], Array], h_BTD: Array, rows: Rows, loss: TokenLossInputs
) -> tuple[Array, Array]:
    """Return log-probabilities of the targets and losses, on every process."""
    logprobs = chunked_logprobs(logits, h_BTD, rows.targets)
    losses = (
        token_losses(logprobs, loss)
        if loss.ratio_mask is None
        else sequence_losses(logprobs, loss, rows.segments)
    )
    return replicate_rows(logprobs), replicate_rows(losses)


def loss_and_grad(
    logits: Logits, trained: Any, h_BTD: Array, rows: Rows, loss: TokenLossInputs
) -> tuple[Array, Array, Array, Any]:
    """Return losses, logprobs, and gradients of the hidden states and of what is trained of the head."""
    if loss.ratio_mask is None:
        return head_loss_and_grad(logits, trained, h_BTD, rows.targets, token_losses, loss)
    of_sequences = partial(sequence_losses, inputs=loss, segments=rows.segments)
    return sequence_loss_and_grad(logits, trained, h_BTD, rows, of_sequences)


def _pass(
    base: Weights[Array], rows: Rows, slots_B: Array, scale_S2: Array, kernels: Kernels, remat: str | None
) -> Pass:
    """Return a pass of training, in which each row has the adapter of a slot."""
    loras = both_loras(partial(row_lora, kernels=kernels), slots_B, scale_S2)
    return Pass(
        segment_attend(kernels, rows.segments),
        *loras,
        sequence_parallel=True,
        remat=remat,
        experts=rows.experts,
        take_factors=take_rows(slots_B, base.embed.dtype, kernels),
        kernels=kernels,
        segments=rows.segments,
        places=rows.places,
    )


def make_forward(
    model: Model,
    mesh: Mesh,
    base: Weights[Weight],
    state: TrainState,
    *,
    kernels: Kernels = Kernels(),
) -> Callable[..., Any]:
    """Make (weights, w, scale, rows, loss) -> (logprobs, losses), float32, on every process."""

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(specs(base), specs(state.w), P(), P(DATA), P(DATA)), out_specs=P()
    )
    def forward(
        base: Weights[Array], w: Adapters[Array], scale: Array, rows: Rows, loss: TokenLossInputs
    ) -> Any:
        adapters = own_adapters(model, w)
        how = _pass(base, rows, rows.slots, scale, kernels, None)
        h_BTD, _, _ = backbone(model, base, adapters, rows.tokens, rows.positions, how)
        unembed = head.whole(base.unembed, model.d_model)
        logits = partial(adapted_logits(unembed, how.apply_lora), adapters.head)
        return logprobs_and_losses(logits, h_BTD, rows, loss)

    return forward


def make_forward_backward(
    model: Model,
    mesh: Mesh,
    base: Weights[Weight],
    state: TrainState,
    remat: str = "full",
    *,
    kernels: Kernels = Kernels(),
) -> Callable[..., Any]:
    """Make (weights, w, grad_sum, scale, rows, loss) -> (grad_sum, logprobs, losses); donates ``grad_sum``.

    ``remat`` is a level of remat.REMAT_LEVELS.
    """
    in_specs = (specs(base), specs(state.w), specs(state.grad_sum), P(), P(DATA), P(DATA))

    @partial(jax.jit, donate_argnums=2)
    @partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=(specs(state.grad_sum), P(), P()))
    def forward_backward(
        base: Weights[Array],
        w: Adapters[Array],
        grad_sum: Adapters[Array],
        scale: Array,
        rows: Rows,
        loss: TokenLossInputs,
    ) -> Any:
        slots_A, index_B = active_slots(rows.slots, scale.shape[0])
        how = _pass(base, rows, index_B, scale[slots_A], kernels, remat)

        # The local loss is differentiated, not the global one: in the backward pass, own_adapters and the
        # gathers of the layers sum the devices' gradients.
        def run(w: Adapters[Array]) -> tuple[Array, Lora[Array]]:
            adapters = own_adapters(model, w)
            return backbone(model, base, adapters, rows.tokens, rows.positions, how)[0], adapters.head

        (h_BTD, factors), pull_back = jax.vjp(run, take_slots(w, slots_A))
        unembed = head.whole(base.unembed, model.d_model)
        logits = adapted_logits(unembed, how.apply_lora)
        losses, logprobs, grad_h, grad_head = loss_and_grad(logits, factors, h_BTD, rows, loss)
        (grad,) = pull_back((grad_h.astype(h_BTD.dtype), grad_head))
        grad_sum = add_to_slots(grad_sum, grad, slots_A)
        return grad_sum, replicate_rows(logprobs), replicate_rows(losses)

    return forward_backward
