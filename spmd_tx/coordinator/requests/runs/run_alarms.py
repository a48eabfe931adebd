"""Says what in the newest metrics of a run needs a look. Pure."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median

HIGH_KL = 0.1  # nats, of a token
LOW_ENTROPY = 0.01  # nats
NORM_TIMES = 10  # by which a gradient is larger than usual
LEAST_BEFORE = 4  # steps that say what is usual
MOST_CHARACTERS = 60  # of a metric's name

NORM = "unclipped_grad_l2:mean"


def _high_kl(values: Sequence[float]) -> str | None:
    if values[-1] <= HIGH_KL:
        return None
    return (
        f"the weights that train are far from those that sampled (kl:mean {values[-1]:.3g}): sample from "
        "newer weights, or lower the learning rate"
    )


def _low_entropy(values: Sequence[float]) -> str | None:
    if values[-1] >= LOW_ENTROPY:
        return None
    return f"answers hardly differ any more (entropy:mean {values[-1]:.3g}): they teach little"


def _large_norm(values: Sequence[float]) -> str | None:
    *before, last = values
    if len(before) < LEAST_BEFORE:
        return None
    usual = median(before)
    if not usual or last <= NORM_TIMES * usual:
        return None
    return f"the gradient's norm, {last:.3g}, is {last / usual:.0f} times as large as usual"


# What finds a fault in the values of a metric, oldest first.
ALARMS: dict[str, Callable[[Sequence[float]], str | None]] = {
    "kl:mean": _high_kl,
    "entropy:mean": _low_entropy,
    NORM: _large_norm,
}


def alarms(rows: Sequence[Mapping[str, float | None]]) -> list[str]:
    """Return sentences about the newest rows of a run's metrics, which are given oldest first."""
    latest = {name: value for row in rows for name, value in row.items()}
    lost = sorted(name[:MOST_CHARACTERS] for name, value in latest.items() if value is None)
    found = [f"not finite: {', '.join(lost[:3])}{' and others' if len(lost) > 3 else ''}"] if lost else []
    for metric, find in ALARMS.items():
        values = [value for row in rows if (value := row.get(metric)) is not None]
        said = find(values) if values and latest[metric] is not None else None
        if said is not None:
            found.append(said)
    return found
