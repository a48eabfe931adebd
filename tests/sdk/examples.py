"""Makes small training data, and common calls of a client."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tinker
from tinker import types

from tests.sdk.server import CONTEXT as CONTEXT
from tests.sdk.server import VOCABULARY as VOCABULARY

SECONDS = 280  # until a test gives up on an answer

# So large an eps makes Adam's update proportional to the gradient: no rounding error is blown up to a
# whole learning rate, so that runs that differ by rounding stay together.
PLAIN_STEP = types.AdamParams(learning_rate=30.0, eps=1000.0)
ADAM_STEP = types.AdamParams(learning_rate=0.01)


def random_tokens(length: int, seed: int) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, VOCABULARY, length).tolist()


def supervised(tokens: Sequence[int], weights: Sequence[float] | None = None) -> types.Datum:
    """Make a datum in which every token is predicted from those before it."""
    weights = [1.0] * (len(tokens) - 1) if weights is None else weights
    return datum(tokens[:-1], target_tokens=list(tokens[1:]), weights=list(weights))


def reinforced(tokens: Sequence[int], logprobs: Sequence[float], advantages: Sequence[float]) -> types.Datum:
    return datum(
        tokens[:-1], target_tokens=list(tokens[1:]), logprobs=list(logprobs), advantages=list(advantages)
    )


def datum(tokens: Sequence[int], **inputs: object) -> types.Datum:
    return types.Datum(model_input=prompt(tokens), loss_fn_inputs=inputs)  # pyright: ignore[reportArgumentType]


def prompt(tokens: Sequence[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))


def batch(seed: int, lengths: Sequence[int] = (20, 9, 31)) -> list[types.Datum]:
    return [supervised(random_tokens(length, seed)) for length in lengths]


def train(
    trainer: tinker.TrainingClient,
    data: list[types.Datum],
    loss: types.LossFnType = "cross_entropy",
    adam: types.AdamParams = ADAM_STEP,
) -> float:
    """Take one step; return the loss before it."""
    gradient = trainer.forward_backward(data, loss)
    update = trainer.optim_step(adam)
    update.result(SECONDS)
    return gradient.result(SECONDS).metrics["loss:sum"]


def logprobs_of(trainer: tinker.TrainingClient, data: list[types.Datum]) -> np.ndarray:
    """Return the log-probabilities of all targets, end to end."""
    output = trainer.forward(data, "cross_entropy").result(SECONDS)
    return np.concatenate([fields["logprobs"].to_numpy() for fields in output.loss_fn_outputs])


def gradient_norm(trainer: tinker.TrainingClient) -> float:
    """Return the norm of the accumulated gradient and clear it; the weights stay."""
    step = trainer.optim_step(types.AdamParams(learning_rate=0.0)).result(SECONDS)
    assert step.metrics is not None
    return step.metrics["unclipped_grad_l2:mean"]


def greedy(max_tokens: int = 8) -> types.SamplingParams:
    return types.SamplingParams(max_tokens=max_tokens, temperature=0.0, stop=[])


def drawn(
    max_tokens: int = 8, seed: int = 0, temperature: float = 1.0, **more: object
) -> types.SamplingParams:
    """Return parameters of a sample that only its length ends."""
    params = {"max_tokens": max_tokens, "seed": seed, "temperature": temperature, "stop": [], **more}
    return types.SamplingParams(**params)  # pyright: ignore[reportArgumentType]


def sample(
    sampler: tinker.SamplingClient, tokens: Sequence[int], params: types.SamplingParams
) -> types.SampledSequence:
    return sampler.sample(prompt(tokens), 1, params).result(SECONDS).sequences[0]


def digests(data_dir: Path, path: str) -> list[str]:
    """Return the digest of the last written weights of checkpoints with a path like this."""
    *_, kind, name = path.split("/")
    folders = [each for each in (data_dir / "checkpoints").rglob(name) if each.is_dir() and kind in str(each)]
    files = [file for folder in folders for file in folder.rglob("*.safetensors")]
    assert files, f"{path} has no files below {data_dir / 'checkpoints'}"
    newest = max(files, key=lambda file: file.stat().st_mtime)
    return [hashlib.sha256(newest.read_bytes()).hexdigest()]
