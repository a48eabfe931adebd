"""Distillation: a student learns from a teacher's probabilities, from its own answers or from the teacher's.

    python docs/examples/distil.py --base-url http://127.0.0.1:8000 --base-model MODEL
    python docs/examples/distil.py --base-model MODEL --off-policy

The teacher is an adapter that was trained on `SENTENCES` here; any sampler can be one: a larger rank, a saved
checkpoint, or a model on another server with the same tokenizer.
"""

import argparse
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tinker
from tinker import types

SENTENCES = [
    "The cat sat on the mat.",
    "The dog sat on the log.",
    "The cat saw the dog.",
    "The dog saw a cat.",
]
PROMPT = "The"
ANSWERS, ANSWER_LENGTH = 16, 12  # per step; tokens
TOP = 8  # most likely tokens that the teacher names at each position


def tensor(values: np.ndarray) -> types.TensorData:
    return types.TensorData.from_numpy(values.astype(np.int64 if values.dtype.kind == "i" else np.float32))


def train_teacher(service: tinker.ServiceClient, base_model: str) -> tinker.SamplingClient:
    trainer = service.create_lora_training_client(base_model, rank=16, seed=1).result()
    tokenizer = trainer.get_tokenizer()
    rows = [np.array(tokenizer.encode(sentence)) for sentence in SENTENCES]
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={"target_tokens": tensor(row[1:]), "weights": tensor(np.ones(len(row) - 1))},
        )
        for row in rows
    ]
    for _ in range(20):
        gradient = trainer.forward_backward(data, "cross_entropy")
        trainer.optim_step(types.AdamParams(learning_rate=0.01)).result()
        gradient.result()
    return trainer.save_weights_and_get_sampling_client().result()


def answers_of(sampler: tinker.SamplingClient, prompt: list[int], seed: int) -> list[types.SampledSequence]:
    params = types.SamplingParams(max_tokens=ANSWER_LENGTH, seed=seed, stop=[])
    return list(sampler.sample(types.ModelInput.from_ints(prompt), ANSWERS, params).result().sequences)


def on_policy_batch(
    teacher: tinker.SamplingClient, student: tinker.SamplingClient, prompt: list[int], seed: int
) -> tuple[list[types.Datum], float]:
    """Draw the student's answers; a token's advantage is how much likelier the teacher finds it."""
    answers = answers_of(student, prompt, seed)
    rows = [[*prompt, *answer.tokens] for answer in answers]
    scores = [teacher.compute_logprobs(types.ModelInput.from_ints(row), ANSWER_LENGTH) for row in rows]
    data, divergences = [], []
    for row, answer, score in zip(rows, answers, scores, strict=True):
        student_logprobs = np.array(answer.logprobs)
        teacher_logprobs = np.array(score.result()[len(prompt) :], np.float64)
        divergences.append(student_logprobs - teacher_logprobs)
        unlearned = np.zeros(len(prompt) - 1)
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(row[:-1]),
                loss_fn_inputs={
                    "target_tokens": tensor(np.array(row[1:])),
                    "logprobs": tensor(np.concatenate([unlearned, student_logprobs])),
                    "advantages": tensor(np.concatenate([unlearned, teacher_logprobs - student_logprobs])),
                },
            )
        )
    return data, float(np.mean(divergences))


def off_policy_batch(teacher: tinker.SamplingClient, prompt: list[int], seed: int) -> list[types.Datum]:
    """Draw the teacher's answers; the targets are its likeliest tokens at each position, weighted."""
    rows = [[*prompt, *answer.tokens] for answer in answers_of(teacher, prompt, seed)]
    one_token = types.SamplingParams(max_tokens=1)
    scores = [
        teacher.sample(types.ModelInput.from_ints(row), 1, one_token, topk_prompt_logprobs=TOP)
        for row in rows
    ]
    data = []
    for row, score in zip(rows, scores, strict=True):
        named = score.result().topk_prompt_logprobs or []
        tokens = np.array([[token for token, _ in position] for position in named[1:] if position])
        logprobs = np.array([[logprob for _, logprob in position] for position in named[1:] if position])
        weights = np.exp(logprobs) / np.exp(logprobs).sum(axis=1, keepdims=True)
        weights[: len(prompt) - 1] = 0.0
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(row[:-1]),
                loss_fn_inputs={"target_tokens": tensor(tokens), "weights": tensor(weights)},
            )
        )
    return data


def distil(
    teacher: tinker.SamplingClient,
    trainer: tinker.TrainingClient,
    prompt: list[int],
    steps: int,
    rate: float,
    is_off_policy: bool,
) -> Iterator[float]:
    """Yield the mean of log(student / teacher) before each step, nats per token of the student's answers."""
    for number in range(steps + 1):
        student = trainer.save_weights_and_get_sampling_client().result()
        batch, divergence = on_policy_batch(teacher, student, prompt, seed=number)
        yield divergence
        if is_off_policy:
            batch = off_policy_batch(teacher, prompt, seed=number)
        gradient = trainer.forward_backward(
            batch, "cross_entropy" if is_off_policy else "importance_sampling"
        )
        trainer.optim_step(types.AdamParams(learning_rate=rate)).result()
        gradient.result()


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--base-model", required=True, help="as the server knows it")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--off-policy", action="store_true", help="learn from the teacher's answers instead")
    arguments = parser.parse_args()

    key: Any = os.environ.get("TINKER_API_KEY", "tml-local")
    with tinker.ServiceClient(base_url=arguments.base_url, api_key=key) as service:
        teacher = train_teacher(service, arguments.base_model)
        trainer = service.create_lora_training_client(arguments.base_model, rank=16, seed=0).result()
        prompt = trainer.get_tokenizer().encode(PROMPT)
        rate, steps = arguments.learning_rate, arguments.steps
        divergences = list(distil(teacher, trainer, prompt, steps, rate, arguments.off_policy))
        print("divergence per token:", " ".join(f"{each:.3f}" for each in divergences))
        print(f"first {divergences[0]:.3f}, last {divergences[-1]:.3f}")


if __name__ == "__main__":
    main()
