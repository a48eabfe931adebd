"""Learns from conversations, completions and texts."""

from collections.abc import Sequence
from typing import Any

import grain
import tinker

from spmd_tx.train.datums import datum
from spmd_tx.train.loop import StepMetrics, WaitFor
from spmd_tx.train.rendering import LearnedTokens

EVALUATED_TOGETHER = 64  # sequences of a request


class Supervised:
    """Minimizes the negative log-likelihood of what is learned."""

    main = "loss"

    def __init__(
        self,
        trainer: tinker.TrainingClient,
        sequences: Sequence[LearnedTokens],
        held_out: Sequence[LearnedTokens],
        batch_size: int,
        seed: int,
    ) -> None:
        self._trainer = trainer
        self._held_out = held_out
        self._batches = batches(sequences, batch_size, seed)

    def send(self, step: int, params: Any) -> WaitFor:
        """Send a batch and its update. The metrics are of the weights before it."""
        batch = self._batches[step]
        gradient = self._trainer.forward_backward([datum(each) for each in batch], "cross_entropy")
        update = self._trainer.optim_step(params)

        def wait() -> StepMetrics:
            loss = gradient.result().metrics["loss:sum"]
            update.result()
            tokens = sum(each.count for each in batch)
            return {"loss": loss / tokens, "tokens": tokens, "learning_rate": params.learning_rate}

        return wait

    def evaluate(self) -> WaitFor | None:
        """Send what is held out."""
        if not self._held_out:
            return None
        sent = [
            self._trainer.forward([datum(each) for each in part], "cross_entropy")
            for part in parts(self._held_out, EVALUATED_TOGETHER)
        ]

        def wait() -> StepMetrics:
            loss = sum(each.result().metrics["loss:sum"] for each in sent)
            return {"eval/loss": loss / sum(each.count for each in self._held_out)}

        return wait


def batches(items: Sequence[Any], size: int, seed: int) -> Any:
    """Return an endless sequence of batches, each epoch in an order of its own.

    Grain finds any of them by its number alone, so a run goes on from the number of its step.
    """
    return grain.MapDataset.source(list(items)).seed(seed).shuffle().repeat().batch(size, batch_fn=list)


def parts(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Cut a sequence into pieces."""
    return [items[start : start + size] for start in range(0, len(items), size)]
