"""Predicts how long a plan takes for a token of reinforcement learning, to choose among plans. Pure.

Answers are drawn once and, if anything is trained, trained on once. The unit is the time in which a device
computes one FLOP, so only the proportion of two plans for the same devices means anything. Attention,
prompts, adapters and what devices send each other are left out: they hardly depend on the choices.
"""

from spmd_tx.worker.memory.plan import FLOPS_PER_BYTE, Plan
from spmd_tx.worker.memory.sizes import USUAL_LENGTH, Sizes

# What a device could compute while it starts the operations of a layer, of both passes: about 200 on a GPU,
# in 2.5 microseconds each. From programs compiled for 8 H100 with 8,192 to 32,768 tokens.
STARTING = 5e11
ELEMENTWISE = 0.02  # part of a forward pass that is not products of matrices
PASSES = 2  # of training: forward and backward, which has no gradients of base weights
# Factors for base weights that fsdp splits. Training gathers them while it computes; drawing sends rows
# instead, which takes nearly as long as reading the weights.
SPLIT_TRAINING, SPLIT_DRAWING = 1.1, 1.75


def cost_of_token(plan: Plan) -> float:
    """Return the time for one token of an answer, on each device of its data shard."""
    drawing, training = _drawing(plan), _training(plan) if plan.train_tokens else 0.0
    if plan.splits_base:
        return SPLIT_DRAWING * drawing + SPLIT_TRAINING * training
    return drawing + training


def _drawing(plan: Plan) -> float:
    """Read the weights once for all sequences that are drawn at once, and what is kept of each one.

    Keys and values are read, a state is also written.
    """
    sizes = plan.sizes
    length = min(sizes.setup.max_context, USUAL_LENGTH)
    sequences = min(plan.decode_rows, plan.cache_tokens / length)
    keys_and_values = length * sizes.page / sizes.setup.page_size
    bytes_read = sizes.whole_base / sequences + keys_and_values + 2 * sizes.state
    return FLOPS_PER_BYTE * bytes_read + _forward(sizes)


def _training(plan: Plan) -> float:
    """Compute the passes; in every micro-batch, start all operations and read the weights for each pass."""
    sizes, level = plan.sizes, plan.usual_level
    forward = _forward(sizes)
    passes = PASSES + 2 * sizes.computed_twice[level] / forward + (0.0 if level == "none" else ELEMENTWISE)
    bytes_read = sizes.whole_base / plan.train_tokens
    starting = STARTING * sizes.model.n_layers / plan.train_tokens
    return passes * (forward + FLOPS_PER_BYTE * bytes_read) + starting


def _forward(sizes: Sizes) -> float:
    """Return the FLOPs of a token's forward pass on each device."""
    return 2 * sizes.numbers_met
