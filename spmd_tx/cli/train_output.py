"""What ``spmd-tx train`` shows of a run, and what it says in the end."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from spmd_tx.demo.display import program

SHOWN = ("loss", "accuracy", "reward", "eval/loss", "eval/accuracy", "eval/reward")  # beside the bar

Show = Callable[[int, Mapping[str, float]], None]  # takes a step, counted from 0, and metrics of it


@contextmanager
def showing(console: Console, steps: int, first: int) -> Iterator[Show]:
    """Show a bar with the newest of all metrics on a terminal, and elsewhere a line for all that arrives."""
    newest, began = dict[str, float](), time.monotonic()
    if not console.is_terminal:

        def line(step: int, metrics: Mapping[str, float]) -> None:
            console.print(f"step {step + 1}/{steps}  {_words(metrics)}  {time.monotonic() - began:.0f} s")

        yield line
        return
    columns = (TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        task = progress.add_task("", total=steps, completed=first)

        def bar(step: int, metrics: Mapping[str, float]) -> None:
            newest.update(metrics)
            progress.update(task, completed=step + 1, description=_words(newest))

        yield bar


def _words(metrics: Mapping[str, float]) -> str:
    shown = [f"{name} {metrics[name]:.4g}" for name in SHOWN if name in metrics]
    return "  ".join([*shown, *([f"{metrics['tokens']:.0f} tokens"] if "tokens" in metrics else [])])


def how_to_use(url: str, has_key: bool, final: str | None, state: str | None) -> list[str]:
    """Return lines that say what to do with the paths of a run's weights and of its training state."""
    body = f'{{"model": "{final}", "messages": [{{"role": "user", "content": "..."}}]}}'
    key = '-H "Authorization: Bearer $TINKER_API_KEY" ' if has_key else ""
    chat = f"curl {url.rstrip('/')}/oai/api/v1/chat/completions {key}-H 'Content-Type: application/json'"
    return [
        f"weights: {final}",
        f"to train on: --from {state}",
        f"ask them: {chat} -d '{body}'",
        f"export them, where the server's files are: {program()} export {final} --data-dir DIR --out FOLDER",
    ]
