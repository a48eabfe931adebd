"""Predicts how long a plan takes for a token of reinforcement learning, to choose among plans. Pure.

Answers are drawn once and trained on once. The unit is the time in which a device computes one FLOP, so only
the proportion of two plans for the same devices means anything. Attention, prompts, adapters and what
devices send each other are left out: they hardly depend on the choices.
"""

from typing import Protocol, runtime_checkable

from spmd_tx.models.config import ModelConfig
from spmd_tx.sharding.mesh import TP
from spmd_tx.worker.memory.sizes import USUAL_LENGTH, Sizes

FLOPS_PER_BYTE = 300  # that a device computes while it reads one byte: 295 on H100, 240 on TPU v5e
# What a device could compute while it starts the operations of a layer, of both passes: about 200 on a GPU,
# in 2.5 microseconds each. From programs compiled for 8 H100 with 8,192 to 32,768 tokens.
STARTING = 5e11
ELEMENTWISE = 0.02  # part of a forward pass that is not products of matrices
PASSES = 2  # of training: forward and backward, which has no gradients of base weights
# Factors for base weights that fsdp splits. Training gathers them while it computes; drawing sends rows
# instead, which takes nearly as long as reading the weights.
SPLIT_TRAINING, SPLIT_DRAWING = 1.1, 1.75


@runtime_checkable
class Choices(Protocol):
    """Defines what the prediction needs of a plan."""

    @property
    def sizes(self) -> Sizes: ...
    @property
    def train_tokens(self) -> int: ...
    @property
    def decode_rows(self) -> int: ...
    @property
    def cache_tokens(self) -> int: ...
    @property
    def splits_base(self) -> bool: ...
    @property
    def usual_level(self) -> str: ...


def cost_of_token(plan: Choices) -> float:
    """Return the time for one token of an answer, on each device of its data shard."""
    drawing, training = _drawing(plan), _training(plan)
    if plan.splits_base:
        return SPLIT_DRAWING * drawing + SPLIT_TRAINING * training
    return drawing + training


def _drawing(plan: Choices) -> float:
    """Read the weights once for all sequences that are drawn at once, and what is kept of each one.

    Keys and values are read, a state is also written.
    """
    sizes = plan.sizes
    length = min(sizes.setup.max_context, USUAL_LENGTH)
    sequences = min(plan.decode_rows, plan.cache_tokens / length)
    keys_and_values = length * sizes.page / sizes.setup.page_size
    bytes_read = sizes.whole_base / sequences + keys_and_values + 2 * sizes.state
    return FLOPS_PER_BYTE * bytes_read + _forward(sizes)


def _training(plan: Choices) -> float:
    """Compute the passes; in every micro-batch, start all operations and read the weights for each pass."""
    passes = PASSES + _computed_twice(plan.sizes.model, plan.usual_level)
    bytes_read = plan.sizes.whole_base / plan.train_tokens
    starting = STARTING * plan.sizes.model.n_layers / plan.train_tokens
    return passes * (_forward(plan.sizes) + FLOPS_PER_BYTE * bytes_read) + starting


def _forward(sizes: Sizes) -> float:
    """Return the FLOPs of a token's forward pass on each device."""
    attention, feed_forward = _weights(sizes.model)
    numbers = sizes.model.n_layers * (attention + feed_forward) + sizes.model.vocab_size * sizes.model.d_model
    return 2 * numbers / sizes.mesh.shape[TP]


def _computed_twice(model: ModelConfig, level: str) -> float:
    """Return the part of a forward pass that the backward pass computes again (models/backbone.py)."""
    attention, feed_forward = _weights(model)
    all_but_down = attention + 2 / 3 * feed_forward  # nothing needs what the down projection returned
    parts = {"none": 0.0, "light": 0.0, "mlp": 2 / 3 * feed_forward, "full": all_but_down}
    elementwise = 0.0 if level == "none" else ELEMENTWISE
    return elementwise + parts[level] / (attention + feed_forward)


def _weights(model: ModelConfig) -> tuple[int, int]:
    """Return the numbers in one layer's weights that a token meets: of attention, and of the rest."""
    heads = 2 * model.n_heads + 2 * model.n_kv_heads
    return model.d_model * heads * model.head_dim, 3 * model.d_model * model.d_ff * max(
        1, model.experts_per_token
    )
