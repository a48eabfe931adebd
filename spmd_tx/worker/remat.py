"""How much of a training step's activations is kept until the way back: an estimate, and a choice from it.

The choice follows from sizes that stay the same when the server is started again, and not from what
happens to be free: requests that are run again after a crash must meet the same program.
"""

import jax.numpy as jnp

from spmd_tx.models.attention import QUERY_BLOCK
from spmd_tx.models.config import ModelConfig
from spmd_tx.protocol import Setup
from spmd_tx.worker.memory import compute_dtype

CPU_ACTIVATION_BYTES = 512 * 2**20  # per device; fresh pages cost a CPU more than doing a product twice


def kept_bytes(model: ModelConfig, level: str, rows: int, row_length: int, tp: int, itemsize: int) -> int:
    """About what a level of qwen3.REMAT_LEVELS keeps of all layers, in bytes per device.

    ``rows`` are those of one data shard. The factors count the arrays of each width that XLA's programs keep.
    """
    width, heads = model.d_model, model.n_heads * model.head_dim
    kv_heads, feed_forward = model.n_kv_heads * model.head_dim, 0 if model.n_experts else model.d_ff
    scores = (
        model.n_heads * row_length if row_length <= 2 * QUERY_BLOCK else 0
    )  # else recomputed, block by block
    numbers = {
        "none": 8 * width + 6 * heads + 4 * kv_heads + 6 * feed_forward + 4 * scores,
        "mlp": 2 * width + 2 * heads + 2 * kv_heads,
        "full": width,
    }
    return -(-numbers[level] // tp) * model.n_layers * rows * row_length * itemsize


def choose(model: ModelConfig, tokens: int, tp: int, itemsize: int, budget: int) -> str:
    """The level that computes least again, of those that keep at most ``budget`` bytes of so many tokens per
    data shard; rows of any length must do."""
    longest = min(2 * QUERY_BLOCK, tokens)  # of those, short ones keep less for their scores
    for level in ("none", "mlp"):
        if kept_bytes(model, level, max(1, tokens // longest), longest, tp, itemsize) <= budget:
            return level
    return "full"


def level_of(setup: Setup, model: ModelConfig, budget: int | None) -> str:
    """What the setup says; with "auto" the choice for ``budget`` bytes per device, None on a CPU."""
    if setup.remat != "auto":
        return setup.remat
    itemsize = jnp.dtype(compute_dtype(setup)).itemsize
    tokens = max(setup.train_tokens, setup.max_context)
    return choose(model, tokens, setup.tp, itemsize, CPU_ACTIVATION_BYTES if budget is None else budget)
