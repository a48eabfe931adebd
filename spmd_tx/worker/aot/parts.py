"""Divides a program into parts of the model: which an operation belongs to, and how long they take."""

from collections.abc import Callable, Sequence

from spmd_tx.hlo.cost import Cost, DeviceOperation
from spmd_tx.hlo.frames import Frame, Frames
from spmd_tx.worker.aot.roofline import Speeds, seconds_of

BETWEEN_DEVICES, OTHER = "between devices", "other"
# The beginning of a file's path in the package, the function, and the part. The innermost frame
# of a stack with a rule decides; functions that many parts call have none.
RULES = (
    ("models/experts/", "", "experts"),
    ("models/attention/", "", "attention"),
    ("models/linear_attention/", "", "delta rule"),
    ("models/adapters/", "", "adapters"),
    ("models/head", "", "head"),
    ("models/sampling", "", "drawing"),
    ("models/", "attention", "maps of attention"),
    ("models/", "delta_rule", "maps of the delta rule"),
    ("models/", "feed_forward", "feed-forward"),
    ("models/", "backbone", "layers"),
    ("worker/steps/losses", "", "head"),
    ("worker/steps/prompt_scores", "", "head"),
    ("worker/steps/optimizer", "", "optimizer"),
    ("worker/steps/train_state", "", "adapters"),
    ("worker/steps/train", "own_adapters", "adapters"),
)
PACKAGE = "spmd_tx/"


def part_of(operation: DeviceOperation, frames: Frames) -> str:
    """Return the part to which an operation belongs."""
    if operation.collective is not None and operation.collective.size > 1:
        return BETWEEN_DEVICES
    return next(filter(None, map(_rule, frames.of(operation.frame))), OTHER)


def _rule(frame: Frame) -> str | None:
    _, is_ours, path = frame.file.rpartition(PACKAGE)
    functions = "", frame.function.split(".")[0]
    rules = (part for file, name, part in RULES if path.startswith(file) and name in functions)
    return next(rules, None) if is_ours else None


def seconds_by_part(cost: Cost, frames: Frames, speeds: Speeds, hosts: Sequence[int]) -> dict[str, float]:
    """Return the time of each part in one run, as if nothing ran beside anything else, the longest first."""
    return added_up(cost, frames, lambda each: each.times * seconds_of(each, speeds, hosts))


def added_up(cost: Cost, frames: Frames, amount: Callable[[DeviceOperation], float]) -> dict[str, float]:
    """Add up an amount of each operation by part, the largest first."""
    amounts: dict[str, float] = {}
    for each in cost.operations:
        part = part_of(each, frames)
        amounts[part] = amounts.get(part, 0.0) + amount(each)
    return dict(sorted(amounts.items(), key=lambda item: -item[1]))
