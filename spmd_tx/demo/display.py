"""Shows the demo's steps in a live table, then the reward curve, in the terminal and as a PNG."""

import math
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

VISIBLE_STEPS = 14
STATUS_INTERVAL = 0.5  # seconds
HEADINGS = ("step", "loss", "reward", "|Δ logprob|", "tokens/s")
BARS = " ▁▂▃▄▅▆▇█"


class Told:
    """Prints a line for each new state of the server where there is no terminal to show it in."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = ""

    def news(self, state: str) -> None:
        kind = state.rstrip("0123456789 %")  # not every percentage
        if kind not in ("", self._last) and not self._console.is_terminal:
            self._console.print(f"server: {state}", soft_wrap=True)
        self._last = kind


class Display:
    """Shows a table with a row per step, above a line that says what the server is compiling.

    Without a terminal it prints a line per step, and per state of the server.
    """

    def __init__(self, console: Console, read_status: Callable[[], str]) -> None:
        self.steps: list[Any] = []  # rl_demo.Step
        self._console = console
        self._read_status = read_status
        self._status = ""
        self._told = Told(console)
        self._stopped = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4)

    @property
    def rewards(self) -> list[float]:
        return [step.reward for step in self.steps if step.reward is not None]

    def add(self, step: Any) -> None:
        if not self._console.is_terminal:
            if not self.steps:
                self._console.print("  ".join(HEADINGS))
            self._console.print("  ".join(cells(step)))
        self.steps.append(step)

    def __enter__(self) -> Self:
        self._watcher.start()
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._watcher.join()
        self._status = ""
        if self._console.is_terminal:
            self._live.stop()

    def _watch(self) -> None:
        while not self._stopped.wait(STATUS_INTERVAL):
            self._status = self._read_status()
            self._told.news(self._status)

    def _render(self) -> RenderableType:
        table = Table(box=None, padding=(0, 2))
        for heading in HEADINGS:
            table.add_column(heading, justify="right")
        for step in self.steps[-VISIBLE_STEPS:]:
            table.add_row(*cells(step))
        return Group(table, Text(self._status or "", style="yellow"))


def cells(step: Any) -> tuple[str, ...]:
    return (
        f"{step.phase} {step.number}",
        f"{round(step.loss, 4) + 0.0:.4f}",  # no minus before a zero
        "-" if step.reward is None else f"{step.reward:.3f}",
        "-" if step.mismatch is None else f"{step.mismatch:.1e}",
        f"{step.tokens / step.seconds:.0f}",
    )


def program() -> str:
    """Return how a shell finds this program: by its name, or where it lies."""
    path = Path(sys.argv[0])
    return path.name if shutil.which(path.name) else str(path)


def draw_curve(
    values: list[float],
    height: int = 8,
    name: str = "reward",
    width: int = 100,
    steps: tuple[int, int] | None = None,
) -> Text:
    """Draw a bar per step, or per mean of several where there are more than ``width``.

    The axis begins at 0 and ends at 1, or where the values do. ``steps`` has the numbers of the first and the
    last step; without it they count from 1.
    """
    stride = max(1, -(-len(values) // width))
    parts = [values[start : start + stride] for start in range(0, len(values), stride)]
    means = [sum(value / len(part) for value in part) for part in parts]  # no sum of huge values
    low, high = min([0.0, *means]), max([1.0 if name == "reward" else 0.0, *means])
    span = (high - low) or 1.0
    if not math.isfinite(span):
        return Text(f"{name}: from {low:.3g} to {high:.3g}, too far apart to be drawn")
    first, last = steps or (1, len(values))
    lines = [name]
    for row in reversed(range(height)):
        bars = (BARS[round(8 * min(max((mean - low) / span * height - row, 0.0), 1.0))] for mean in means)
        lines.append(f"{low + span / height * (row + 1):8.3g} │" + "".join(bars))
    lines.append("         └" + "─" * len(means))
    lines.append(f"          {first} {last:>{max(0, len(means) - 1 - len(str(first)))}}  step")
    return Text("\n".join(lines))


def save_plot(steps: list[Any], path: Path) -> None:
    """Draw loss and reward over the steps."""
    from matplotlib.figure import Figure  # not pyplot: that would look for a display

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    loss_axes, reward_axes = figure.subplots(1, 2)
    loss_axes.plot([step.loss for step in steps if step.reward is None], marker=".")
    loss_axes.set(title="Supervised fine-tuning", xlabel="step", ylabel="loss per token, nats")
    reward_axes.plot([step.reward for step in steps if step.reward is not None], marker=".")
    reward_axes.set(title="Reinforcement learning", xlabel="step", ylabel="mean reward", ylim=(0, 1))
    figure.savefig(path, dpi=120)
