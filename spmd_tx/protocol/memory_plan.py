"""The memory plan as workers report it and people read it. spmd_tx/worker/memory/plan.py calculates it."""

import msgspec

from spmd_tx.byte_sizes import show_size

# By the level of a program's name, which says what training keeps of its forward pass.
COMPUTED_AGAIN = {
    "none": "nothing",
    "light": "what costs little",
    "mlp": "the feed-forward blocks",
    "full": "everything",
}


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what workers have room for, per data shard, and what that takes of each device, in bytes."""

    pages: int  # including page 0, which holds nothing
    train_tokens: int  # most of a training micro-batch; a single row may be longer; 0: nothing is trained
    decode_rows: int  # most of one Decode
    # Of training blocks, the small ones first; (): micro-batches are blocks.
    block_tokens: tuple[int, ...] = ()
    page_size: int = 0  # tokens
    device_bytes: int = 0  # usable bytes
    base_bytes: int = 0
    adapter_slots: int = 0  # training slots; 0: nothing is trained
    adapter_bytes: int = 0  # of these: weights, gradient, two moments
    bank_bytes: int = 0  # sampler slots
    cache_bytes: int = 0  # pages of keys and values
    state_slots: int = 0  # for the states of sequences, slot 0 included; 0: the model keeps none
    state_bytes: int = 0
    tower_bytes: int = 0  # the vision tower
    image_tokens: int = 0  # for which the pool has rows; 0: images are not read
    image_bytes: int = 0
    compiling_bytes: int = 0  # to try kernels beside a step, on GPUs
    step_bytes: int = 0  # what is left for steps while they run
    step_needs: dict[str, int] = {}  # bytes for the largest batch of each step: "train light 4 x 2048"
    remat: dict[str, str] = {}  # what training computes twice, by micro-batch: "4 x 2048" -> "light"
    splits_base: bool = False  # whether fsdp splits the base weights
    on_cpu: bool = False  # whether the devices are CPUs: blocks of rows are small then
    draft_cost: float = 0.0  # of making drafts, in steps that make none; 0: the model cannot
    ridge_tokens: float = 0.0  # that a device computes while it reads the weights once; 0: not known

    @property
    def cache_tokens(self) -> int:
        return (self.pages - 1) * self.page_size


def uses(plan: MemoryPlan) -> list[tuple[str, int, str]]:
    """Return what takes memory: what, bytes of each device, note."""
    split = "split over fsdp" if plan.splits_base else ""
    largest = max(plan.step_needs, key=lambda step: plan.step_needs[step], default="")
    states = ("states", plan.state_bytes, f"of {plan.state_slots - 1} sequences and prefixes")
    trained = f"{plan.adapter_slots}: weights, gradient and two moments in float32"
    training = ("training slots", plan.adapter_bytes, trained)
    vision = (
        ("vision tower", plan.tower_bytes, ""),
        ("images", plan.image_bytes, f"of {plan.image_tokens} tokens"),
    )
    compiling = ("compiling", plan.compiling_bytes, "to try kernels beside a step")
    return [
        ("base weights", plan.base_bytes, split),
        *([training] if plan.train_tokens else []),
        ("sampler slots", plan.bank_bytes, ""),
        *(vision if plan.image_tokens else ()),
        ("steps while they run", plan.step_bytes, f"most needs {largest}" if largest else ""),
        *([compiling] if plan.compiling_bytes else []),
        *([states] if plan.state_slots else []),
        ("keys and values", plan.cache_bytes, f"for {plan.cache_tokens} tokens"),
    ]


def rows(plan: MemoryPlan) -> list[tuple[str, str, str]]:
    """Return the rows of a table: what, size per device, note."""
    in_all = "in all", plan.device_bytes, "that may be used of each device"
    return [(what, show_size(size), note) for what, size, note in (*uses(plan), in_all)]


def choices(plan: MemoryPlan) -> list[tuple[str, str]]:
    """Return what was chosen per data shard, as pairs of what and choice."""
    training = [
        ("micro-batch of training", f"up to {plan.train_tokens} tokens, or one longer sequence"),
        ("block of a micro-batch", _block(plan.block_tokens)),
        ("computed again in the backward pass, to save memory", _by_level(plan.remat)),
    ]
    return [*(training if plan.train_tokens else []), ("sequences sampled at once", str(plan.decode_rows))]


def summary(plan: MemoryPlan) -> str:
    """Return the plan in one line, for the log."""
    parts = [f"{what} {size}" for what, size, _ in rows(plan)]
    return "; ".join([*parts, *(f"{what}: {choice}" for what, choice in choices(plan))])


def _block(sizes: tuple[int, ...]) -> str:
    return " or ".join(map(str, sizes)) + " tokens" if sizes else "the micro-batch"


def _by_level(remat: dict[str, str]) -> str:
    """Summarize the levels by row length, shortest first: "nothing in rows of up to 2048 tokens"."""
    longest: list[tuple[str, int]] = []
    for shape, level in remat.items():
        length = int(shape.split(" x ")[1])
        if longest and longest[-1][0] == level:
            longest[-1] = (level, length)
        else:
            longest.append((level, length))
    parts = [f"{COMPUTED_AGAIN.get(level, level)} in rows of up to {length}" for level, length in longest]
    return ", ".join(parts) + " tokens"
