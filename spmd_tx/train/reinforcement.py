"""Learns from rewards, by advantages within a group of answers and importance sampling.

Shao et al., 2024, arXiv:2402.03300; the advantage is not divided by the deviation of its group.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import tinker
from tinker import types

from spmd_tx.errors import StartError
from spmd_tx.train.datums import policy_datum
from spmd_tx.train.environment import RewardEnvironment, messages
from spmd_tx.train.loop import StepMetrics, WaitFor
from spmd_tx.train.rendering import Renderer
from spmd_tx.train.supervised import batches

REWARDED_AT_ONCE = 16  # answers; a reward may ask another model


@dataclass(frozen=True)
class Drawing:
    """How answers are drawn."""

    prompts_per_step: int
    group_size: int  # answers to a prompt
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class RewardedAnswer:
    """An answer to a prompt, and what it is worth."""

    prompt: list[int]
    sample: types.SampledSequence
    reward: float


class Reinforcement:
    """Makes answers above the mean of their group likelier, and those below it less likely."""

    main = "reward"

    def __init__(
        self,
        trainer: tinker.TrainingClient,
        renderer: Renderer,
        environment: RewardEnvironment,
        drawing: Drawing,
    ) -> None:
        self._trainer = trainer
        self._renderer = renderer
        self._environment = environment
        self._drawing = drawing
        self._batches = batches(environment.prompts, drawing.prompts_per_step, drawing.seed)

    def send(self, step: int, params: Any) -> WaitFor:
        """Draw and reward groups of answers, then send those whose group has a preference."""
        drawing = self._drawing
        sampling = types.SamplingParams(
            max_tokens=drawing.max_tokens, temperature=drawing.temperature, seed=drawing.seed + step
        )
        groups = self._draw(self._batches[step], drawing.group_size, sampling)
        answers = [answer for group in groups for answer in group]
        data = list[types.Datum]()
        for group in groups:
            mean = float(np.mean([answer.reward for answer in group]))
            for answer in group:
                if answer.reward != mean and answer.sample.tokens:
                    data.append(policy_datum(answer.prompt, answer.sample, answer.reward - mean))
        sent: list[Any] = []
        if data:  # else all answers of each group are worth the same
            sent = [
                self._trainer.forward_backward(data, "importance_sampling"),
                self._trainer.optim_step(params),
            ]

        def wait() -> StepMetrics:
            for future in sent:
                future.result()
            lengths = [len(answer.sample.tokens) for answer in answers]
            return {
                "reward": float(np.mean([answer.reward for answer in answers])),
                "answer_tokens": float(np.mean(lengths)),
                "cut_off": float(np.mean([answer.sample.stop_reason == "length" for answer in answers])),
                "groups_alike": float(
                    np.mean([len({answer.reward for answer in group}) == 1 for group in groups])
                ),
                "tokens": sum(lengths),
                "learning_rate": params.learning_rate,
            }

        return wait

    def evaluate(self) -> WaitFor | None:
        """Draw the likeliest answer to each prompt that is held out."""
        if not self._environment.held_out:
            return None
        greedy = types.SamplingParams(max_tokens=self._drawing.max_tokens, temperature=0.0)
        groups = self._draw(self._environment.held_out, 1, greedy)
        reward = float(np.mean([answer.reward for group in groups for answer in group]))
        return lambda: {"eval/reward": reward}

    def _draw(
        self, prompts: Sequence[Any], size: int, params: types.SamplingParams
    ) -> list[list[RewardedAnswer]]:
        """Return a group of answers to each prompt, by the weights as they are now."""
        sampler = self._trainer.save_weights_and_get_sampling_client().result()
        asked = [self._renderer.prompt(messages(prompt)) for prompt in prompts]
        futures = [sampler.sample(types.ModelInput.from_ints(tokens), size, params) for tokens in asked]
        drawn = [list(future.result().sequences) for future in futures]
        with ThreadPoolExecutor(REWARDED_AT_ONCE) as pool:
            rewards = pool.map(
                self._reward,
                [prompt for prompt, group in zip(prompts, drawn, strict=True) for _ in group],
                [self._renderer.decode(sequence.tokens) for group in drawn for sequence in group],
            )
            return [
                [RewardedAnswer(tokens, each, next(rewards)) for each in group]
                for tokens, group in zip(asked, drawn, strict=True)
            ]

    def _reward(self, prompt: Any, answer: str) -> float:
        try:
            worth = float(self._environment.reward(prompt, answer))
        except Exception as problem:  # the user's code may raise anything
            raise StartError(
                f"reward raises {type(problem).__name__}: {problem}; the answer was {answer[:200]!r}"
            ) from problem
        if not np.isfinite(worth):
            raise StartError(f"reward is {worth} for the answer {answer[:200]!r}; it must be a finite number")
        return worth
