"""Compares a run with crashes with one without, and tabulates many such runs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

COLUMNS = "database seed kills cuts steps differences errors pause/s seconds".split()


@dataclass(frozen=True)
class Outcome:
    """Holds the result of one run."""

    database: str
    seed: int
    kills: Counter[str]  # by what they hit: a named point, or any time
    cuts: Counter[str]
    differences: Counter[str]  # from the undisturbed run, by kind
    miscounted_steps: list[str]
    errors: list[str]  # that a client saw
    bad_exits: list[str]  # of processes that were not killed
    longest_pause: float  # seconds
    seconds: float
    steps: int  # of optimizers

    def problems(self) -> list[str]:
        """Return everything that is wrong."""
        differences = [f"{count} x {what}" for what, count in self.differences.items()]
        return [
            *differences,
            *self.miscounted_steps,
            *(error[-2000:] for error in self.errors),
            *self.bad_exits,
        ]

    def row(self) -> list[str]:
        different = self.differences.total() + len(self.miscounted_steps)
        numbers = [self.seed, self.kills.total(), self.cuts.total(), self.steps, different, len(self.errors)]
        return [self.database, *map(str, numbers), f"{self.longest_pause:.1f}", f"{self.seconds:.0f}"]


def table(outcomes: Sequence[Outcome]) -> str:
    """Format a line for each run, their sum, and where the kills hit."""
    lines = [COLUMNS, *(outcome.row() for outcome in outcomes)]
    kills = sum((outcome.kills for outcome in outcomes), Counter[str]())
    cuts = sum((outcome.cuts for outcome in outcomes), Counter[str]())
    figures = {
        "kills": kills.total(),
        "cuts": cuts.total(),
        "optimizer steps": sum(outcome.steps for outcome in outcomes),
        "differences": sum(outcome.differences.total() for outcome in outcomes),
        "miscounted steps": sum(len(outcome.miscounted_steps) for outcome in outcomes),
        "errors that a client saw": sum(len(outcome.errors) for outcome in outcomes),
        "seconds of the longest pause": round(max((each.longest_pause for each in outcomes), default=0), 1),
    }
    totals = [
        ", ".join(f"{count} {what}" for what, count in figures.items()),
        "kills: " + ", ".join(f"{where} {count}" for where, count in sorted(kills.items())),
        "cuts: " + ", ".join(f"{where} {count}" for where, count in sorted(cuts.items())),
    ]
    return "\n".join([*("  ".join(f"{cell:>11}" for cell in line) for line in lines), *totals])
