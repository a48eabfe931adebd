"""Qwen3 with LoRA and the losses of the Tinker API, for one sequence: plain formulas, no mesh.

It shares no code with the package, so an error would have to be made twice to stay unseen.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from spmd_tx.models.declared.model import Model

MLP = ("gate", "up", "down")


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x²) + eps) · weight (Zhang and Sennrich 2019)."""
    mean_square = jnp.sum(x * x, axis=-1, keepdims=True) / x.shape[-1]
    return x / jnp.sqrt(mean_square + eps) * jnp.broadcast_to(weight, x.shape)


def rotate(x: Array, theta: float) -> Array:
    """Each pair (x_i, x_{i+E/2}) as a complex number, turned by position · theta^(-2i/E) (Su et al. 2021)."""
    tokens, width = x.shape
    half = width // 2
    frequencies = [theta ** (-2 * i / width) for i in range(half)]
    angles = jnp.outer(jnp.arange(tokens, dtype=jnp.float32), jnp.array(frequencies, jnp.float32))
    turn = jax.lax.complex(jnp.cos(angles), jnp.sin(angles))
    turned = jax.lax.complex(x[:, :half], x[:, half:]) * turn
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def linear(x: Array, kernel: Array, lora: Any, scale: float) -> Array:
    """y = x (W + scale · Aᵀ B) (Hu et al. 2021)."""
    return x @ (kernel + scale * (lora.a.T @ lora.b))


def attention_head(q: Array, k: Array, v: Array) -> Array:
    """softmax(q kᵀ / √E) v over the past (Vaswani et al. 2017)."""
    scores = q @ k.T / q.shape[-1] ** 0.5
    is_past = jnp.tril(jnp.ones(scores.shape, bool))
    return jax.nn.softmax(jnp.where(is_past, scores, -jnp.inf), axis=-1) @ v


def swiglu(w: Any, lora: dict[str, Any], scale: float, h: Array) -> Array:
    """(silu(h Wg) · h Wu) Wd (Shazeer 2020)."""
    gate, up = linear(h, w.gate, lora["gate"], scale), linear(h, w.up, lora["up"], scale)
    return linear(gate / (1 + jnp.exp(-gate)) * up, w.down, lora["down"], scale)


def chosen(model: Model, probabilities: Array) -> Array:
    """Which experts are the most likely ones."""
    limit = jnp.sort(probabilities, axis=-1)[:, -model.experts_per_token]
    return probabilities >= limit[:, None]


def mixture(model: Model, w: Any, lora: dict[str, Any], scale: float, h: Array) -> Array:
    """Σ p_e · swiglu_e(h) over the experts of highest probability; the p of those sum to 1."""
    probabilities = jnp.exp(h @ w.router)
    probabilities = probabilities / jnp.sum(probabilities, axis=-1, keepdims=True)
    weights = jnp.where(chosen(model, probabilities), probabilities, 0.0)
    if model.mixture.route.normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)

    def expert(matrices: dict[str, Array], its_lora: dict[str, Any]) -> Array:
        return swiglu(SimpleNamespace(**matrices), its_lora, scale, h)

    mine = {name: lora[name] for name in MLP}
    # Factors that all experts share have no dimension of experts.
    axes = jax.tree.map(lambda leaf: 0 if leaf.ndim == 3 else None, mine)
    outputs = jax.vmap(expert, in_axes=(0, axes))({name: getattr(w, name) for name in MLP}, mine)
    return jnp.einsum("te,etd->td", weights, outputs)


Scales = Any  # alpha / rank of linear maps, and of experts


def layer(model: Model, w: Any, lora: dict[str, Any], scales: Scales, x: Array) -> Array:
    scale, expert_scale = scales[0], scales[1]
    eps, width = model.norm.eps, model.head_dim
    h = rms_norm(x, w.attention_norm, eps)
    q, k, v = (linear(h, getattr(w, name), lora[name], scale) for name in "qkv")

    def attended(head: Array) -> Array:
        group = head * model.n_kv_heads // model.n_heads
        q_head, k_head, v_head = (
            jax.lax.dynamic_slice_in_dim(y, i * width, width, axis=1)
            for y, i in ((q, head), (k, group), (v, group))
        )
        q_head = rotate(rms_norm(q_head, w.q_norm, eps), model.attention.rope.theta)
        k_head = rotate(rms_norm(k_head, w.k_norm, eps), model.attention.rope.theta)
        return attention_head(q_head, k_head, v_head)

    heads = jnp.concatenate(jax.vmap(attended)(jnp.arange(model.n_heads)), axis=-1)
    x = x + linear(heads, w.o, lora["o"], scale)
    h = rms_norm(x, w.mlp_norm, eps)
    if model.n_experts:
        return x + mixture(model, w, lora, expert_scale, h)
    return x + swiglu(w, lora, scale, h)


def logits(model: Model, base: Any, adapter: Any, scales: Scales, tokens: Array) -> Array:
    """[T, V] for one sequence and one adapter without a slot axis."""
    x = base.embed[tokens]
    for index in range(model.n_layers):
        w = jax.tree.map(lambda leaf, i=index: leaf[i], base.layers)
        lora = jax.tree.map(lambda leaf, i=index: leaf[i], adapter.layers)
        x = layer(model, w, lora, scales, x)
    unembed = base.embed if base.head is None else base.head
    return linear(rms_norm(x, base.final_norm, model.norm.eps), unembed.T, adapter.head, scales[0])


def logprobs(model: Model, base: Any, adapter: Any, scales: Scales, tokens: Array, targets: Array) -> Array:
    """log softmax(logits) at the targets, [T]."""
    z = logits(model, base, adapter, scales, tokens)
    z = z - jnp.max(z, axis=-1, keepdims=True)
    return (z - jnp.log(jnp.sum(jnp.exp(z), axis=-1, keepdims=True)))[jnp.arange(len(targets)), targets]


def cross_entropy(logprob: Array, datum: Any) -> Array:
    return -datum.weights * logprob


def importance_sampling(logprob: Array, datum: Any) -> Array:
    return -datum.advantages * jnp.exp(logprob - datum.sampling_logprobs)


def ppo(logprob: Array, datum: Any) -> Array:
    """The ratio is capped where more would pay: above for gains, below for losses (Schulman et al. 2017)."""
    ratio, (low, high) = jnp.exp(logprob - datum.sampling_logprobs), datum.clip
    capped = jnp.where(datum.advantages > 0, jnp.minimum(ratio, high), jnp.maximum(ratio, low))
    return -datum.advantages * capped


def cispo(logprob: Array, datum: Any) -> Array:
    """REINFORCE with a clipped importance weight that is a constant (MiniMax-M1, 2025, eq. 4)."""
    ratio, (low, high) = jnp.exp(logprob - datum.sampling_logprobs), datum.clip
    weight = jax.lax.stop_gradient(jnp.minimum(jnp.maximum(ratio, low), high))
    return -weight * datum.advantages * logprob


def dro(logprob: Array, datum: Any) -> Array:
    """Policy gradient with a quadratic penalty on the log-ratio (Richemond et al. 2024)."""
    return -datum.advantages * logprob + datum.beta / 2 * (logprob - datum.sampling_logprobs) ** 2


def stable_reinforce(logprob: Array, datum: Any) -> Array:
    """REINFORCE with importance weights capped at c, and k3 (Schulman 2020), made straight where r > c."""
    cap = datum.clip[1]
    r = jnp.exp(logprob - datum.sampling_logprobs)
    k3 = r - 1 - jnp.log(r)
    tangent = cap - 1 - jnp.log(cap) + (cap - 1) * jnp.log(r / cap)
    weight = jax.lax.stop_gradient(jnp.where(r < cap, r, cap))
    penalty = datum.kl_coeff * jnp.where(r < cap, k3, tangent) + datum.beta / 2 * jnp.log(r) ** 2
    return penalty - weight * datum.advantages * logprob


LOSSES = {
    loss.__name__: loss for loss in (cross_entropy, importance_sampling, ppo, cispo, dro, stable_reinforce)
}


def gspo(logprob: Array, datum: Any) -> Array:
    """GSPO-token of one sequence (Zheng et al. 2025), with the mean over the mask's tokens."""
    (inside,) = np.nonzero(datum.ratio_mask)
    mean = jnp.sum(logprob[inside] - datum.sampling_logprobs[inside]) / max(1, len(inside))
    ratio = jax.lax.stop_gradient(jnp.exp(mean) / jnp.exp(logprob)) * jnp.exp(logprob)
    low, high = datum.clip
    capped = jnp.where(datum.advantages > 0, jnp.minimum(ratio, high), jnp.maximum(ratio, low))
    return -datum.advantages * capped
