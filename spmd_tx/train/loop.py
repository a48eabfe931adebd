"""The loop that all kinds of training share: send a step, save, evaluate, and note what came of it."""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import tinker

from spmd_tx.train.folder import RunFolder
from spmd_tx.train.optimizers import TrainOptimizer

StepMetrics = Mapping[str, float]
WaitFor = Callable[[], StepMetrics]  # waits for what was sent
AHEAD = 2  # steps that are sent before the result of an older one is awaited


class Kind(Protocol):
    """One kind of training: supervised, of preferences, or by reinforcement."""

    main: str  # metric to draw

    def send(self, step: int, params: Any) -> WaitFor:
        """Send the requests of a step, with the parameters of its optimizer."""
        ...

    def evaluate(self) -> WaitFor | None:
        """Send the requests of an evaluation; None if there is nothing to evaluate on."""
        ...


@dataclass(frozen=True)
class Schedule:
    """How many steps there are, and what happens at which."""

    steps: int
    optimizer: TrainOptimizer
    learning_rate: float
    shape: str  # constant, linear or cosine
    save_every: int  # steps
    eval_every: int  # steps

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        left = 1 - step / self.steps
        if self.shape == "linear":
            return self.learning_rate * left
        if self.shape == "cosine":
            return self.learning_rate * 0.5 * (1 - math.cos(math.pi * left))
        return self.learning_rate


def train(
    trainer: tinker.TrainingClient,
    kind: Kind,
    schedule: Schedule,
    folder: RunFolder,
    show: Callable[[int, StepMetrics], None],
    forget: Callable[[str], None],
) -> None:
    """Run the steps that the folder's run has left, and save the weights to sample from.

    ``show`` is told of each step's metrics, ``forget`` of each checkpoint that a newer one replaces.
    """
    waiting: deque[Callable[[], None]] = deque()

    def later(step: int, wait: WaitFor) -> None:
        def finish() -> None:
            metrics = wait()
            folder.add_metrics(step, metrics)
            show(step, metrics)

        waiting.append(finish)

    def save(step: int) -> None:
        saving = trainer.save_state(f"step-{step:06}")

        def finish() -> None:
            before = folder.place.state
            folder.save(step, saving.result().path)
            if before is not None:
                forget(before)

        waiting.append(finish)

    first = folder.place.step
    if first == 0 and (evaluation := kind.evaluate()):
        later(0, evaluation)
    for step in range(first, schedule.steps):
        later(step, kind.send(step, schedule.optimizer.params(learning_rate=schedule.rate(step))))
        done = step + 1
        if (done % schedule.eval_every == 0 or done == schedule.steps) and (evaluation := kind.evaluate()):
            later(step, evaluation)
        if done % schedule.save_every == 0 or done == schedule.steps:
            save(done)
        while len(waiting) > AHEAD:
            waiting.popleft()()
    while waiting:
        waiting.popleft()()
    final = trainer.save_weights_for_sampler("final").result().path
    folder.save(schedule.steps, folder.place.state, final)
