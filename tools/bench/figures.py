"""Computes the figures that `make bench` compares, and judges them."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

Turn = dict[str, Any]  # results by section, of one turn of one server

# Of a section, on a server that has just started with nothing compiled. The first repetition does not count.
FIRST_MINUTE = "first minute: "
FIRST_OF_WARM = 0.85  # of its speed when all is compiled, at least; times are turned round

# In this order. The fresh ones come last, so that no section finds programs that they had compiled.
SECTIONS = (
    "healthz forward_1_token sample_1_token train_1_token create_model train_uniform train_ragged "
    "sample_uniform sample_ragged sample_single rl_iteration tenants train_fresh sample_fresh"
).split()


@dataclass(frozen=True)
class Figure:
    """Describes a figure; the bounds are for ours divided by the peer's, with the model tiny."""

    name: str
    unit: str
    section: str
    read: Callable[[list[dict[str, Any]]], float]  # from the section's result in each turn
    is_lower_better: bool = False
    must: float | None = None
    aim: float | None = None
    is_cpu_bound: bool = False  # whether work per CPU second is of interest, too
    counts_compiling: bool = False  # so the first minute cannot be like the later ones

    @property
    def is_of_first_minute(self) -> bool:
        return self.section in SECTIONS


@dataclass(frozen=True)
class Row:
    """Holds a figure of both servers; None where one has none, with the reason."""

    figure: Figure
    ours: float | None
    peer: float | None
    first: float | None = None  # ours in the first minute
    cpu_ratio: float | None = None  # ours / peer: work per CPU second of the server's processes
    error: str = ""

    @property
    def ratio(self) -> float | None:
        return self.ours / self.peer if self.ours is not None and self.peer else None

    @property
    def first_speed(self) -> float | None:
        """The speed of the first minute, as a share of that when all is compiled."""
        return self._speed_of_first(self.ours)

    @property
    def first_ahead(self) -> float | None:
        """How many times as fast as the peer ours is in the first minute."""
        return self._speed_of_first(self.peer)

    def _speed_of_first(self, other: float | None) -> float | None:
        if not self.first or not other:
            return None
        return other / self.first if self.figure.is_lower_better else self.first / other

    def first_verdict(self) -> str:
        """Say whether the first minute is what it should be; empty if it was not measured."""
        if self.first is None:
            return "no figure" if self.figure.is_of_first_minute and self.error else ""
        problems = []
        share, ahead = self.first_speed, self.first_ahead
        if share is not None and share < FIRST_OF_WARM and not self.figure.counts_compiling:
            problems.append(f"below {FIRST_OF_WARM:g} of warm")
        if ahead is not None and ahead <= 1:
            problems.append("behind the peer")
        return ", ".join(problems) or "met"

    def verdict(self) -> str:
        """Compare with the bounds; empty if there are none."""
        if self.figure.must is None or self.figure.aim is None:
            return ""
        if self.ratio is None:
            return "no figure"
        if _reaches(self.figure, self.ratio, self.figure.aim):
            return "aim met"
        return "must met" if _reaches(self.figure, self.ratio, self.figure.must) else "missed"


def _reaches(figure: Figure, ratio: float, bound: float) -> bool:
    return ratio <= bound if figure.is_lower_better else ratio >= bound


def percentile(values: Sequence[float], share: float) -> float:
    """Interpolate linearly between the two nearest values; share is between 0 and 1."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * share
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _pooled(results: list[dict[str, Any]], key: str) -> list[float]:
    return [value for result in results for value in result[key]]


def median_ms(results: list[dict[str, Any]]) -> float:
    return 1000 * statistics.median(_pooled(results, "seconds"))


def median_seconds(results: list[dict[str, Any]]) -> float:
    return statistics.median(_pooled(results, "seconds"))


def p95_seconds(results: list[dict[str, Any]]) -> float:
    return percentile(_pooled(results, "seconds"), 0.95)


def median_rate(results: list[dict[str, Any]]) -> float:
    """Return the tokens per second of the median repetition."""
    pairs = zip(_pooled(results, "tokens"), _pooled(results, "seconds"), strict=True)
    return statistics.median(tokens / seconds for tokens, seconds in pairs)


def overall_rate(results: list[dict[str, Any]]) -> float:
    """Return the tokens per second of all repetitions together."""
    return sum(_pooled(results, "tokens")) / sum(_pooled(results, "seconds"))


def requests_rate(results: list[dict[str, Any]]) -> float:
    return statistics.median(result["requests_per_s"] for result in results)


def peak_mib(results: list[dict[str, Any]]) -> float:
    return max(result["peak_mib"] for result in results)


FIGURES = (
    Figure("1-token forward", "ms", "forward_1_token", median_ms, True, 0.10, 0.04),
    Figure("training, uniform lengths", "tokens/s", "train_uniform", median_rate, False, 2, 3, True),
    Figure("training, ragged lengths", "tokens/s", "train_ragged", median_rate, False, 10, 15, True),
    Figure(
        "training, new lengths each round", "tokens/s", "train_fresh", overall_rate, False, 10, 18, True, True
    ),
    Figure("sampling, uniform", "tokens/s", "sample_uniform", median_rate, False, 1.0, 1.5, True),
    Figure("sampling, ragged max_tokens", "tokens/s", "sample_ragged", median_rate, False, 3, 4.5, True),
    Figure(
        "sampling, new shapes each round", "tokens/s", "sample_fresh", overall_rate, False, 4, 6, True, True
    ),
    Figure("sampling, single stream", "tokens/s", "sample_single", median_rate, False, 1.0, 1.5, True),
    Figure("RL iteration, median", "s", "rl_iteration", median_seconds, True, 0.35, 0.2),
    Figure("RL iteration, p95", "s", "rl_iteration", p95_seconds, True, 0.15, 0.08),
    Figure("4 tenants", "requests/s", "tenants", requests_rate, False, 4, 8),
    Figure("4 tenants, p95 of a request", "s", "tenants", p95_seconds, True),
    Figure("start to first sample, warm cache", "s", "warm_start", median_seconds, True, 0.5, 0.3),
    Figure("start to first sample, nothing compiled", "s", "cold_start", median_seconds, True),
    Figure("start until all is compiled ahead", "s", "settled", median_seconds, True),
    Figure("peak memory over the whole run", "MiB", "memory", peak_mib, True, 0.4, 0.25),
    Figure("1-token sample", "ms", "sample_1_token", median_ms, True),
    Figure("1-token training step", "ms", "train_1_token", median_ms, True),
    Figure("new model", "ms", "create_model", median_ms, True),
)


def rows(ours: list[Turn], peer: list[Turn], has_bounds: bool = True) -> list[Row]:
    """Return one row per figure that either side has tried; bounds are for the model tiny."""
    found = []
    for figure in FIGURES:
        if not any(_is_tried(turn, figure.section) for turn in ours + peer):
            continue
        mine, theirs = _succeeded(ours, figure.section), _succeeded(peer, figure.section)
        of_first = FIRST_MINUTE + figure.section
        first = _succeeded(ours, of_first)
        failures = [
            *_errors("ours", ours, figure.section),
            *_errors("ours in the first minute", ours, of_first),
            *_errors("peer", peer, figure.section),
        ]
        row = Row(
            figure if has_bounds else replace(figure, must=None, aim=None),
            ours=figure.read(mine) if mine else None,
            peer=figure.read(theirs) if theirs else None,
            first=figure.read(first) if first else None,
            cpu_ratio=_work_per_cpu(mine) / _work_per_cpu(theirs)
            if figure.is_cpu_bound and mine and theirs
            else None,
            error="; ".join(failures),
        )
        found.append(row)
    return found


def _is_tried(turn: Turn, section: str) -> bool:
    return section in turn or FIRST_MINUTE + section in turn


def _succeeded(turns: list[Turn], section: str) -> list[dict[str, Any]]:
    return [turn[section] for turn in turns if section in turn and "error" not in turn[section]]


def _errors(side: str, turns: list[Turn], section: str) -> list[str]:
    return [f"{side}: {turn[section]['error']}" for turn in turns if "error" in turn.get(section, {})]


def _work_per_cpu(results: list[dict[str, Any]]) -> float:
    """Return the tokens per CPU second of all processes of the server."""
    return sum(_pooled(results, "tokens")) / max(sum(result["cpu_s"] for result in results), 0.01)
