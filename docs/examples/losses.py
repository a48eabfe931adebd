"""Compute every loss of reinforcement learning on the same samples, with the loss inputs that each needs.

    python docs/examples/losses.py --base-url http://127.0.0.1:8000 --base-model MODEL

Samples are drawn, the model is moved away from them by a step, and then each loss is computed for them. The
gradient norm says how hard each of them would pull.
"""

import argparse
import os
from typing import Any

import numpy as np
import tinker
from tinker import types

PROMPT = "The cat sat on"
SAMPLES, LENGTH = 4, 8  # tokens

CONFIGS: dict[str, dict[str, float | str]] = {
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "stable_reinforce": {"truncation": 2.0, "kl_coeff": 0.05, "kl_estimator": "k3"},
}


def tensor(values: np.ndarray) -> types.TensorData:
    return types.TensorData.from_numpy(values.astype(np.int64 if values.dtype.kind == "i" else np.float32))


def datum(prompt: list[int], sample: types.SampledSequence, advantage: float) -> types.Datum:
    """Make a datum of a whole sequence. The prompt is not learned, because its advantages are 0."""
    tokens = np.array([*prompt, *sample.tokens])
    unlearned = np.zeros(len(prompt) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": tensor(tokens[1:]),
            "logprobs": tensor(np.concatenate([unlearned, sample.logprobs or []])),
            "advantages": tensor(np.concatenate([unlearned, np.full(len(sample.tokens), advantage)])),
        },
    )


def with_input(plain: types.Datum, name: str, values: np.ndarray) -> types.Datum:
    return types.Datum(plain.model_input, {**plain.loss_fn_inputs, name: tensor(values)})


def with_ratio_mask(plain: types.Datum, prompt: list[int]) -> types.Datum:
    """Add what gspo needs: the ratio of a sequence is taken over the sampled tokens."""
    length = plain.model_input.length
    return with_input(plain, "sequence_ratio_mask", np.arange(length) >= len(prompt) - 1)


def with_spans(plain: types.Datum, prompt: list[int], sample: types.SampledSequence) -> types.Datum:
    """Add what stable_reinforce needs: where the tokens and, one position later, the targets come from."""
    name, count = sample.sequence_id, len(sample.tokens)
    return plain.with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=name, length=len(prompt)),
            types.SampledProvenanceSpan(sequence_id=name, length=count - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=name, offset=1, length=len(prompt) - 1),
            types.SampledProvenanceSpan(sequence_id=name, length=count),
        ],
    )


def compute(
    trainer: tinker.TrainingClient, data: list[types.Datum], loss: Any, config: dict[str, float | str] | None
) -> str:
    """Return the loss and the norm of its gradient; a step with learning rate 0 clears the gradient again."""
    gradient = trainer.forward_backward(data, loss, config)
    step = trainer.optim_step(types.AdamParams(learning_rate=0.0)).result()
    norm = (step.metrics or {})["unclipped_grad_l2:mean"]
    return f"loss {gradient.result().metrics['loss:sum']:9.4f}, gradient {norm:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--base-model", required=True, help="as the server knows it")
    arguments = parser.parse_args()

    key = os.environ.get("TINKER_API_KEY", "tml-local")
    with tinker.ServiceClient(base_url=arguments.base_url, api_key=key) as service:
        trainer = service.create_lora_training_client(arguments.base_model, rank=8, seed=0).result()
        prompt = trainer.get_tokenizer().encode(PROMPT)
        sampler = trainer.save_weights_and_get_sampling_client(record_stability_info=True).result()
        params = types.SamplingParams(max_tokens=LENGTH, seed=1, stop=[])
        question = types.ModelInput.from_ints(prompt)
        samples = sampler.sample(question, SAMPLES, params).result().sequences
        advantages = np.linspace(-1, 1, SAMPLES)  # in place of rewards minus their mean
        plain = [datum(prompt, *each) for each in zip(samples, advantages, strict=True)]

        trainer.forward_backward(plain, "importance_sampling")
        trainer.optim_step(types.AdamParams(learning_rate=0.0003)).result()

        data = {
            "gspo": [with_ratio_mask(each, prompt) for each in plain],
            "stable_reinforce": [
                with_spans(each, prompt, sample) for each, sample in zip(plain, samples, strict=True)
            ],
        }
        for loss, config in CONFIGS.items():
            print(f"{loss + ':':20} {compute(trainer, data.get(loss, plain), loss, config)}")

        # A datum's own threshold, or one for each of its tokens, overrides the request's.
        own = [with_input(each, "clip_high_threshold", np.array([1.05])) for each in plain]
        print(f"{'ppo, own clip:':20} {compute(trainer, own, 'ppo', CONFIGS['ppo'])}")


if __name__ == "__main__":
    main()
