"""How much of a training step's activations is kept until the way back: an estimate, and a choice from it.

The choice follows from sizes that stay the same when the server is started again, and not from what
happens to be free: requests that are run again after a crash must meet the same program.
"""

import jax.numpy as jnp

from spmd_tx.models.config import ModelConfig
from spmd_tx.protocol import Setup
from spmd_tx.worker.memory import compute_dtype

CPU_ACTIVATION_BYTES = 256 * 2**20  # per device; fresh pages cost a CPU nearly what the products save


def kept_bytes(model: ModelConfig, level: str, tokens: int, tp: int, itemsize: int) -> int:
    """About what a level of qwen3.REMAT_LEVELS keeps of all layers, in bytes per device.

    ``tokens`` are those of one data shard. What adapters add is left out: it is little.
    """
    width, heads = model.d_model, model.n_heads * model.head_dim
    attention = heads + 2 * model.n_kv_heads * model.head_dim + heads + model.n_heads  # operands and results
    numbers = {
        "none": 2 * width + attention + 2 * (0 if model.n_experts else model.d_ff),
        "mlp": 2 * width + attention,
        "full": width,
    }
    return -(-numbers[level] // tp) * model.n_layers * tokens * itemsize


def choose(model: ModelConfig, tokens: int, tp: int, itemsize: int, budget: int) -> str:
    """The level that computes least again, of those that keep at most ``budget`` bytes of so many tokens."""
    for level in ("none", "mlp"):
        if kept_bytes(model, level, tokens, tp, itemsize) <= budget:
            return level
    return "full"


def level_of(setup: Setup, model: ModelConfig, budget: int | None) -> str:
    """What the setup says; with "auto" the choice for ``budget`` bytes per device, None on a CPU."""
    if setup.remat != "auto":
        return setup.remat
    itemsize = jnp.dtype(compute_dtype(setup)).itemsize
    tokens = max(setup.train_tokens, setup.max_context)
    return choose(model, tokens, setup.tp, itemsize, CPU_ACTIVATION_BYTES if budget is None else budget)
