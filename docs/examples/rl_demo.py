"""Fine-tune, then do reinforcement learning, with the Tinker SDK and any server of its API.

    spmd-tx make-model models/tiny && spmd-tx serve --base-model models/tiny
    python docs/examples/rl_demo.py --base-model models/tiny

The task is a toy which even a tiny random model can learn: the reward of an answer is the share of
its tokens that contain the letter "o". Replace `reward` and `PROMPTS` by your own.
"""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np
import tinker
from tinker import types

# About one token in ten has the rewarded letter, as in a random answer: imitation alone gains nothing.
SENTENCES = [
    "A brown bird sings on top of the tree.",
    "The cat took one fish and then it slept.",
    "We came too late and the train was gone.",
    "My brother reads three books every month.",
    "They swim across the lake at noon.",
    "She baked bread for the whole school.",
    "It rains and the woods are green again.",
    "Behind those hills there is an old road.",
    "He wrote a long letter to his mother.",
    "Two dogs run around in the park.",
    "The snow is gone before spring comes.",
    "This motor needs water or oil soon.",
]
PROMPTS = ["Tell me a tale.", "What did she say?", "The ship left", "I remember"]
ANSWERS_PER_PROMPT = 8
ANSWER_LENGTH = 16  # tokens


@dataclass(frozen=True)
class Step:
    """Holds the figures of one training step."""

    phase: str
    number: int
    loss: float  # per token
    reward: float | None  # mean over the answers, 0 to 1
    mismatch: float | None  # mean |log-probability when sampled - when trained|; 0 up to rounding
    tokens: int  # sampled and trained
    seconds: float


def supervised_steps(
    trainer: tinker.TrainingClient, tokenizer: Any, learning_rate: float, steps: int, batch_size: int = 8
) -> Iterator[Step]:
    """Fine-tune on the sentences; yield a report of each step."""
    batches = (
        grain.MapDataset.source(SENTENCES)
        .seed(0)
        .shuffle()
        .map(lambda sentence: imitation_datum(tokenizer.encode(sentence)))
        .repeat()
        .batch(batch_size, batch_fn=list)
    )
    for number in range(steps):
        started = time.perf_counter()
        batch: list[types.Datum] = list(batches[number] or ())
        # Both requests are sent before the first result is awaited: the server runs them back to back.
        gradient = trainer.forward_backward(batch, "cross_entropy")
        update = trainer.optim_step(types.AdamParams(learning_rate=learning_rate))
        loss = gradient.result().metrics["loss:sum"]
        update.result()

        tokens = sum(datum.model_input.length for datum in batch)
        yield Step("imitate", number, loss / tokens, None, None, tokens, time.perf_counter() - started)


def imitation_datum(tokens: list[int]) -> types.Datum:
    """Make a datum in which every token is predicted from those before it."""
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:])),
            "weights": types.TensorData.from_numpy(np.ones(len(tokens) - 1, np.float32)),
        },
    )


def reward(tokenizer: Any, tokens: list[int]) -> float:
    """Return the share of tokens that contain the letter "o"."""
    return float(np.mean(["o" in tokenizer.decode([token]) for token in tokens]))


def reinforcement_steps(
    trainer: tinker.TrainingClient, tokenizer: Any, learning_rate: float, steps: int
) -> Iterator[Step]:
    """Run group-relative policy optimization: answers above the mean of their group become more likely."""
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    for number in range(steps):
        started = time.perf_counter()
        sampler = trainer.save_weights_and_get_sampling_client().result()
        groups = sample_groups(sampler, prompts, seed=number)

        data: list[types.Datum] = []
        rewards: list[float] = []
        for prompt, answers in zip(prompts, groups, strict=True):
            group_rewards = [reward(tokenizer, answer.tokens) for answer in answers]
            rewards += group_rewards
            for answer, answer_reward in zip(answers, group_rewards, strict=True):
                data.append(
                    policy_datum(prompt, answer, advantage=answer_reward - float(np.mean(group_rewards)))
                )

        gradient = trainer.forward_backward(data, "importance_sampling")
        # The learning rate falls to zero, so that the last steps settle.
        update = trainer.optim_step(types.AdamParams(learning_rate=learning_rate * (1 - number / steps)))
        output = gradient.result()
        update.result()

        answer_tokens = sum(len(answer.tokens) for answers in groups for answer in answers)
        trained_tokens = sum(datum.model_input.length for datum in data)
        yield Step(
            "reinforce",
            number,
            output.metrics["loss:sum"] / answer_tokens,
            float(np.mean(rewards)),
            logprob_mismatch(data, output),
            answer_tokens + trained_tokens,
            time.perf_counter() - started,
        )


def sample_groups(
    sampler: tinker.SamplingClient, prompts: list[list[int]], seed: int
) -> list[list[types.SampledSequence]]:
    """Draw a group of answers to each prompt; all prompts are sent before the first answer is awaited."""
    params = types.SamplingParams(max_tokens=ANSWER_LENGTH, temperature=1.0, seed=seed)
    futures = [
        sampler.sample(types.ModelInput.from_ints(prompt), ANSWERS_PER_PROMPT, params) for prompt in prompts
    ]
    return [list(future.result().sequences) for future in futures]


def policy_datum(prompt: list[int], answer: types.SampledSequence, advantage: float) -> types.Datum:
    """Make a datum of an answer and its sampled log-probabilities; the prompt is not learned.

    Its spans name the sample, so that the console shows the advantage beside it.
    """
    if answer.logprobs is None:
        raise ValueError("the server returned an answer without log-probabilities")
    tokens = [*prompt, *answer.tokens]
    unlearned = len(prompt) - 1
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:])),
            "logprobs": _padded(unlearned, np.array(answer.logprobs)),
            "advantages": _padded(unlearned, np.full(len(answer.tokens), advantage)),
        },
    ).with_provenance(
        model_input=_spans(answer, 0, len(prompt), len(answer.tokens) - 1),
        loss_fn_inputs=_spans(answer, 1, unlearned, len(answer.tokens)),
    )


def _spans(answer: types.SampledSequence, offset: int, prompt: int, sampled: int) -> types.ProvenanceSpans:
    """Say how many tokens are of an answer's prompt, from ``offset`` on, and how many of itself."""
    return [
        types.PromptProvenanceSpan(sequence_id=answer.sequence_id, offset=offset, length=prompt),
        types.SampledProvenanceSpan(sequence_id=answer.sequence_id, length=sampled),
    ]


def _padded(zeros: int, values: np.ndarray) -> types.TensorData:
    return types.TensorData.from_numpy(np.concatenate([np.zeros(zeros), values]).astype(np.float32))


def logprob_mismatch(data: list[types.Datum], output: types.ForwardBackwardOutput) -> float:
    """Return the mean absolute difference between the trainer's and the sampler's log-probabilities."""
    differences = []
    for datum, result in zip(data, output.loss_fn_outputs, strict=True):
        sampled = datum.loss_fn_inputs["logprobs"].to_numpy()
        trained = result["logprobs"].to_numpy()
        differences.append(np.abs(trained - sampled)[sampled != 0])
    return float(np.mean(np.concatenate(differences)))


def sample_from_saved_state(
    service: tinker.ServiceClient, trainer: tinker.TrainingClient, tokenizer: Any
) -> str:
    """Save weights and optimizer, load them into a new client, and sample an answer from it."""
    path = trainer.save_state("final").result().path
    successor = service.create_training_client_from_state_with_optimizer(path).result()
    sampler = successor.save_weights_and_get_sampling_client().result()
    prompt = PROMPTS[0]
    answer = sample_groups(sampler, [tokenizer.encode(prompt)], seed=0)[0][0]
    return prompt + readable(tokenizer.decode(answer.tokens))


def readable(text: str) -> str:
    """Show a dot for bytes that are not UTF-8, which tiny models produce, and for control characters."""
    broken = "\N{REPLACEMENT CHARACTER}"
    return "".join(each if each.isprintable() and each != broken else "·" for each in text)


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--base-model", required=True, help="as the server knows it")
    parser.add_argument("--learning-rate", type=float, default=0.006)
    parser.add_argument("--steps", type=int, default=40, help="of reinforcement learning")
    arguments = parser.parse_args()

    service = tinker.ServiceClient(
        base_url=arguments.base_url, api_key=os.environ.get("TINKER_API_KEY", "tml-local")
    )
    trainer = service.create_lora_training_client(arguments.base_model, rank=16, seed=0).result()
    tokenizer = trainer.get_tokenizer()
    for step in supervised_steps(trainer, tokenizer, arguments.learning_rate, steps=8):
        print(f"{step.phase} {step.number}: loss {step.loss:.3f}")
    for step in reinforcement_steps(trainer, tokenizer, arguments.learning_rate, arguments.steps):
        print(
            f"{step.phase} {step.number}: reward {step.reward:.2f}, {step.tokens / step.seconds:.0f} tokens/s"
        )
    print(sample_from_saved_state(service, trainer, tokenizer))


if __name__ == "__main__":
    main()
