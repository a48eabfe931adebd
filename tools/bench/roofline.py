"""Computes the least time that a step can take, from its arithmetic and the bytes that it must move."""

from dataclasses import dataclass

from spmd_tx.models.declared.model import Model

BYTES = 2  # of a number in bfloat16


@dataclass(frozen=True)
class Ceilings:
    """Holds the peak rates of one device."""

    teraflops: float = 790.0  # of a large bfloat16 product, seen on an H200
    gigabytes: float = 4300.0  # per second, read and written by a large copy there

    def seconds(self, flops: float, moved: float) -> float:
        """Return the least time for so many operations and bytes, which overlap."""
        return max(flops / (self.teraflops * 1e12), moved / (self.gigabytes * 1e9))


def layer_parameters(model: Model) -> int:
    """Count the weights of one layer's linear maps."""
    heads, kv_heads = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    return model.d_model * (2 * heads + 2 * kv_heads + 3 * model.d_ff)


def parameters(model: Model) -> int:
    """Count the weights that a token is multiplied with: all layers and the head."""
    return model.n_layers * layer_parameters(model) + model.d_model * model.vocab_size


def adapter_parameters(model: Model, rank: int) -> int:
    """Count the weights of an adapter of every linear map, including the head."""
    heads, kv_heads = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    attention = 2 * (model.d_model + heads) + 2 * (model.d_model + kv_heads)
    feed_forward = 3 * (model.d_model + model.d_ff)
    return rank * (model.n_layers * (attention + feed_forward) + model.d_model + model.vocab_size)


def attention_flops(model: Model, length: int) -> float:
    """Return the operations of a forward pass, on average per token of a causal sequence."""
    return 2.0 * length * model.n_heads * model.head_dim * model.n_layers


def training_flops(model: Model, rank: int, length: int, *, twice: bool = False) -> float:
    """Return the operations per token: forward and back through frozen weights, and the adapter's gradients.

    ``twice``: with everything computed a second time on the backward pass.
    """
    n, r, a = parameters(model), adapter_parameters(model, rank), attention_flops(model, length)
    return 6.0 * n + 8.0 * r + 4.5 * a if twice else 4.0 * n + 6.0 * r + 3.5 * a


def prefill_flops(model: Model, rank: int, length: int) -> float:
    """Return the operations per token, without the head."""
    n = model.n_layers * layer_parameters(model)
    return 2.0 * n + 2.0 * adapter_parameters(model, rank) + attention_flops(model, length)


def decode_bytes(model: Model, rank: int, rows: int, context: int, adapters: int = 1) -> float:
    """Return the bytes of one step: all weights, the adapters in use, and all rows' keys and values."""
    cache = 2.0 * model.n_layers * model.n_kv_heads * model.head_dim * rows * context
    return BYTES * (parameters(model) + adapters * adapter_parameters(model, rank) + cache)


def decode_flops(model: Model, rank: int, rows: int, context: int) -> float:
    """Return the operations of one step."""
    attention = 4.0 * context * model.n_heads * model.head_dim * model.n_layers
    return rows * (2.0 * (parameters(model) + adapter_parameters(model, rank)) + attention)
