"""Learns from preferences, by direct preference optimization.

Rafailov et al., 2023, arXiv:2305.18290, equation 7.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import tinker

from spmd_tx import durable_files
from spmd_tx.train.datums import datum, learned_logprobs
from spmd_tx.train.folder import RunFolder
from spmd_tx.train.loop import StepMetrics, WaitFor
from spmd_tx.train.rendering import LearnedTokens
from spmd_tx.train.supervised import EVALUATED_TOGETHER, batches, parts

AnswerPair = tuple[LearnedTokens, LearnedTokens]  # the better answer, the worse one
# And the log-probability of the first less that of the second, by the reference.
Ratio = tuple[AnswerPair, float]


class Preferences:
    """Makes the better answer likelier than the worse, compared with the model before the training."""

    main = "loss"

    def __init__(
        self,
        trainer: tinker.TrainingClient,
        pairs: Sequence[AnswerPair],
        held_out: Sequence[AnswerPair],
        folder: RunFolder,
        options: tuple[int, int, float],
    ) -> None:
        """``options`` are the batch size, the seed, and beta, the strength with which the reference holds."""
        size, seed, self._beta = options
        self._trainer = trainer
        reference = self._reference([*pairs, *held_out], folder)
        self._held_out = list(zip(held_out, reference[len(pairs) :], strict=True))
        self._batches = batches(list(zip(pairs, reference, strict=False)), size, seed)

    def send(self, step: int, params: Any) -> WaitFor:
        """Look at a batch, then send the gradient of its loss as the weights of its tokens."""
        batch: list[Ratio] = self._batches[step]
        margins = self._beta * self._beyond_reference(batch)
        pushes = self._beta * _sigmoid(-margins)
        data = [
            datum(answer, weight)
            for (pair, _), push in zip(batch, pushes.tolist(), strict=True)
            for answer, weight in zip(pair, (push, -push), strict=True)
        ]
        gradient = self._trainer.forward_backward(data, "cross_entropy")
        update = self._trainer.optim_step(params)

        def wait() -> StepMetrics:
            gradient.result()
            update.result()
            tokens = sum(answer.count for pair, _ in batch for answer in pair)
            return {**_figures(margins), "tokens": tokens, "learning_rate": params.learning_rate}

        return wait

    def evaluate(self) -> WaitFor | None:
        """Compare the pairs that are held out."""
        if not self._held_out:
            return None
        figures = _figures(self._beta * self._beyond_reference(self._held_out))
        return lambda: {f"eval/{name}": value for name, value in figures.items()}

    def _reference(self, pairs: Sequence[AnswerPair], folder: RunFolder) -> list[float]:
        """The ratios before the training; kept in the folder, for when the run goes on."""
        path = folder.path / "reference.json"
        if folder.place.step and path.exists():
            return msgspec.json.decode(path.read_bytes(), type=list[float])
        ratios = self._ratios(pairs).tolist()
        durable_files.write_file(path, msgspec.json.encode(ratios))
        return ratios

    def _beyond_reference(self, batch: Sequence[Ratio]) -> np.ndarray:
        return self._ratios([pair for pair, _ in batch]) - np.array([ratio for _, ratio in batch])

    def _ratios(self, pairs: Sequence[AnswerPair]) -> np.ndarray:
        """Return log p(better) - log p(worse) of each pair, float64 [pairs]."""
        pieces = parts(pairs, EVALUATED_TOGETHER // 2)
        sent = [
            self._trainer.forward([datum(answer) for pair in piece for answer in pair], "cross_entropy")
            for piece in pieces
        ]
        ratios = list[float]()
        for piece, future in zip(pieces, sent, strict=True):
            output = future.result()
            answers = [answer for pair in piece for answer in pair]
            sums = [
                float(learned_logprobs(output, place, answer).sum(dtype=np.float64))
                for place, answer in enumerate(answers)
            ]
            ratios += [better - worse for better, worse in zip(sums[::2], sums[1::2], strict=True)]
        return np.array(ratios)


def _sigmoid(values: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -values))


def _figures(margins: np.ndarray) -> dict[str, float]:
    return {
        "loss": float(np.logaddexp(0, -margins).mean()),
        "accuracy": float((margins > 0).mean()),
        "margin": float(margins.mean()),
    }
