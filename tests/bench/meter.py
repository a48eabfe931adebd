"""Times steps, tells each figure as soon as it is known, and keeps what failed with its reason."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import jax

SAMPLES = 7
FAILURES = (jax.errors.JaxRuntimeError, NotImplementedError, RuntimeError, TypeError, ValueError)


@dataclass
class Meter:
    """Writes one JSON line per figure."""

    path: Path
    deadline: float  # of time.monotonic
    rows: list[dict[str, Any]] = field(default_factory=list)

    def row(self, name: str, **values: Any) -> None:
        self.rows.append({"name": name, **values})
        with self.path.open("a") as file:
            file.write(json.dumps(self.rows[-1]) + "\n")
        print(shown(self.rows[-1]), flush=True)

    @contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Turn a failure inside into a row: out of memory, or no kernel for these sizes."""
        try:
            yield
        except FAILURES as error:
            self.row(name, problem=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")

    def measure(
        self,
        name: str,
        step: Any,
        *args: Any,
        floor: float = 0.0,
        tokens: float = 0.0,
        per: int = 1,
        carried: tuple[int, ...] = (),
        **facts: Any,
    ) -> None:
        """Compile and time a jitted step.

        ``floor``: the least seconds that it can take. ``per``: how many repetitions one call has.
        ``carried``: the numbers of the donated arguments, which the first outputs replace.
        """
        if time.monotonic() > self.deadline:
            self.row(name, problem="not measured: no time left")
            return
        with self.guard(name):
            start = time.perf_counter()
            program = step.lower(*args).compile()
            memory = program.memory_analysis()
            facts["compile_seconds"] = round(time.perf_counter() - start, 2)
            if memory is not None:
                facts["temporary_gigabytes"] = round(memory.temp_size_in_bytes / 1e9, 3)
            seconds = [sample / per for sample in samples(program, list(args), carried, self.deadline)]
            best = min(seconds)
            values = {"milliseconds": 1e3 * median(seconds), "least_milliseconds": 1e3 * best}
            if tokens:
                values["tokens_per_second"] = tokens / median(seconds)
            if floor:
                values["of_ceiling"] = floor / median(seconds)
            self.row(name, **values, **facts)


def samples(
    program: Callable[..., Any], args: list[Any], carried: tuple[int, ...], deadline: float
) -> list[float]:
    """Return the seconds of some calls, after one that does not count."""
    seconds: list[float] = []
    for _ in range(1 + SAMPLES):
        start = time.perf_counter()
        out = program(*args)
        jax.block_until_ready(out)
        seconds.append(time.perf_counter() - start)
        for place, number in enumerate(carried):
            args[number] = out[place]
        if len(seconds) > 3 and time.monotonic() > deadline:
            break
    return seconds[1:]


def shown(row: dict[str, Any]) -> str:
    """Format a row for people."""
    if "problem" in row:
        return f"  {row['name']:60} {row['problem']}"
    parts = []
    for name, value in row.items():
        if name == "of_ceiling":
            parts.append(f"{100 * value:.1f} % of ceiling")
        elif name != "name":
            parts.append(f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}")
    return f"  {row['name']:60} {', '.join(parts)}"


def markdown(report: dict[str, list[dict[str, Any]]]) -> str:
    """Format the tables of all parts as Markdown."""
    lines = ["# Measured", ""]
    columns = ("milliseconds", "tokens_per_second", "of_ceiling", "compile_seconds", "temporary_gigabytes")
    for part, rows in report.items():
        lines += [f"## {part}", "", "| what | ms | tokens/s | of ceiling | compiled in s | GB | else |"]
        lines += ["|---|---|---|---|---|---|---|"]
        for row in rows:
            cells = [f"{row[name]:.4g}" if name in row else "" for name in columns]
            known = {"name", "least_milliseconds", *columns}
            rest = "; ".join(f"{key} {value}" for key, value in row.items() if key not in known)
            lines.append(f"| {row['name']} | {' | '.join(cells)} | {rest.replace('|', '/')} |")
        lines.append("")
    return "\n".join(lines)
