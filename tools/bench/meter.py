"""Times steps, tells each figure as soon as it is known, and keeps what failed with its reason."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import jax

from tools.bench.by_part import Parts, parts_of

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
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
        by_part: bool = False,
        options: Mapping[str, Any] = NO_OPTIONS,
        **facts: Any,
    ) -> None:
        """Compile and time a jitted step, with ``by_part`` also its parts beside what is predicted of them.

        ``options``: XLA's, for this program. ``floor``: the least seconds that it can take. ``per``: how many
        repetitions one call has. ``carried``: the numbers of the donated arguments, which the first outputs
        replace.
        """
        if time.monotonic() > self.deadline:
            self.row(name, problem="not measured: no time left")
            return
        with self.guard(name):
            start = time.perf_counter()
            lowered = step.lower(*args)
            program = lowered.compile(compiler_options=dict(options))
            memory, held = program.memory_analysis(), list(args)
            facts["compile_seconds"] = round(time.perf_counter() - start, 2)
            if memory is not None:
                facts["temporary_gigabytes"] = round(memory.temp_size_in_bytes / 1e9, 3)
            seconds = [sample / per for sample in samples(program, held, carried, self.deadline)]
            best = min(seconds)
            values = {"milliseconds": 1e3 * median(seconds), "least_milliseconds": 1e3 * best}
            if tokens:
                values["tokens_per_second"] = tokens / median(seconds)
            if floor:
                values["of_ceiling"] = floor / median(seconds)
            parts = parts_of(in_sight(lowered, program), held, per)[0] if by_part else None
            if parts is not None:
                values["predicted_milliseconds"] = 1e3 * parts.predicted
            self.row(name, **values, **facts)
            if parts is not None:
                self.rows_of_parts(name, parts)

    def rows_of_parts(self, name: str, parts: Parts) -> None:
        """Tell of each part what was measured beside what was predicted."""
        for part in dict.fromkeys([*parts.measured_parts, *parts.predicted_parts]):
            values = {"predicted_milliseconds": 1e3 * parts.predicted_parts.get(part, 0.0)}
            if parts.measured_parts:
                values["milliseconds"] = 1e3 * parts.measured_parts.get(part, 0.0)
            self.row(name, part=part, **values)


def in_sight(lowered: Any, program: Any) -> Any:
    """Return a program whose operations a profile names: a CUDA graph would be one event of many kernels."""
    if jax.devices()[0].platform != "gpu":
        return program
    return lowered.compile(compiler_options={"xla_gpu_enable_command_buffer": ""})


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
        outputs = out if isinstance(out, tuple) else (out,)
        for place, number in enumerate(carried):
            args[number] = outputs[place]
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


COLUMNS = {
    "milliseconds": "ms",
    "predicted_milliseconds": "predicted, ms",
    "tokens_per_second": "tokens/s",
    "of_ceiling": "of ceiling",
    "compile_seconds": "compiled in s",
    "temporary_gigabytes": "GB",
}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Format rows as the lines of a table in Markdown, without columns that no row has."""
    columns = {name: title for name, title in COLUMNS.items() if any(name in row for row in rows)}
    known = {"name", "least_milliseconds", *columns}
    has_rest = any(row.keys() - known for row in rows)
    titles = ["what", *columns.values(), *(["else"] if has_rest else [])]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for row in rows:
        cells = [row["name"], *(f"{row[name]:.4g}" if name in row else "" for name in columns)]
        rest = "; ".join(f"{key} {value}" for key, value in row.items() if key not in known)
        cells += [rest.replace("|", "/")] if has_rest else []
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def markdown(report: dict[str, list[dict[str, Any]]]) -> str:
    """Format the tables of all parts as Markdown."""
    lines = ["# Measured", ""]
    for part, rows in report.items():
        lines += [f"## {part}", "", *table(rows), ""]
    return "\n".join(lines)
