"""Uses a Tinker server through whichever release of the SDK is installed."""

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import tinker
from tinker import types

API_KEY = "tml-bench"
LEARNING_RATE = 1e-5
RANK = 32
FIRST_TOKEN = 300  # of those that texts are made of


class Client:
    """Holds a session with trainers and samplers. No wait for a result goes beyond the deadline."""

    def __init__(self, url: str, model: str, vocab_size: int, seed: int = 0) -> None:
        self.model = model
        self.deadline = math.inf  # of time.monotonic()
        self.service = tinker.ServiceClient(base_url=url, api_key=API_KEY)
        self._vocab_size = vocab_size
        self._random = random.Random(seed)
        self._trainers: list[tinker.TrainingClient] = []

    def done(self, future: Any) -> Any:
        """Wait for the value; older releases of the SDK return some values at once."""
        if not hasattr(future, "result"):
            return future
        return future.result(timeout=max(1.0, min(self.deadline - time.monotonic(), 3600.0)))

    @property
    def trainer(self) -> tinker.TrainingClient:
        """Return the trainer that most sections share."""
        return self.trainers(1)[0]

    def trainers(self, count: int) -> list[tinker.TrainingClient]:
        """Return the first so many trainers, creating missing ones: the peer has room for seven."""
        while len(self._trainers) < count:
            self.new_trainer()
        return self._trainers[:count]

    def new_trainer(self) -> tinker.TrainingClient:
        made = self.service.create_lora_training_client(base_model=self.model, rank=RANK, seed=1)
        self._trainers.append(self.done(made))
        return self._trainers[-1]

    def base_sampler(self) -> tinker.SamplingClient:
        return self.done(self.service.create_sampling_client(base_model=self.model))

    def sampler_of(self, trainer: tinker.TrainingClient) -> tinker.SamplingClient:
        """Return a sampler of the trainer's present weights."""
        return self.done(trainer.save_weights_and_get_sampling_client())

    def text(self, length: int) -> list[int]:
        return [self._random.randrange(FIRST_TOKEN, self._vocab_size) for _ in range(length)]

    def datum(self, length: int) -> types.Datum:
        ids = self.text(length + 1)
        inputs = {"target_tokens": tensor(ids[1:], "int64"), "weights": tensor([1.0] * length, "float32")}
        return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)

    def train(
        self, trainer: tinker.TrainingClient, data: list[types.Datum], loss: Any = "cross_entropy"
    ) -> None:
        """Send one forward_backward and one optim_step together."""
        for future in train_soon(trainer, data, loss):
            self.done(future)

    def sample(
        self, sampler: tinker.SamplingClient, prompts: Sequence[list[int]], limits: Sequence[int], copies: int
    ) -> list[list[types.SampledSequence]]:
        """Sample from all prompts at once; return the sequences of each."""
        futures = sample_soon(sampler, prompts, limits, copies)
        return [list(self.done(future).sequences) for future in futures]


def train_soon(
    trainer: tinker.TrainingClient, data: list[types.Datum], loss: Any = "cross_entropy"
) -> list[Any]:
    step = types.AdamParams(learning_rate=LEARNING_RATE)
    return [trainer.forward_backward(data, loss), trainer.optim_step(step)]


def sample_soon(
    sampler: tinker.SamplingClient, prompts: Sequence[list[int]], limits: Sequence[int], copies: int
) -> list[Any]:
    return [
        sampler.sample(
            types.ModelInput.from_ints(prompt),
            num_samples=copies,
            sampling_params=types.SamplingParams(max_tokens=limit, temperature=1.0, seed=index),
        )
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]


def policy_datum(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """Make the datum of importance sampling for one sequence."""
    drawn = list(sequence.tokens)
    ids = [*prompt, *drawn]
    given = len(prompt) - 1
    inputs = {
        "target_tokens": tensor(ids[1:], "int64"),
        "logprobs": tensor([0.0] * given + [float(value) for value in sequence.logprobs or ()], "float32"),
        "advantages": tensor([0.0] * given + [advantage] * len(drawn), "float32"),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def tensor(values: list, dtype: Any) -> types.TensorData:
    return types.TensorData(data=values, dtype=dtype, shape=[len(values)])


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that the call took, and its value."""
    began = time.perf_counter()
    value = call()
    return time.perf_counter() - began, value


def log_uniform(draw: random.Random, least: int, most: int) -> int:
    """Draw a length; every octave is equally frequent."""
    return round(math.exp(draw.uniform(math.log(least), math.log(most))))
