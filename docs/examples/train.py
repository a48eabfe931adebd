"""Fine-tune on answers only, watch the loss on held-out data, save, resume, and sample.

    python docs/examples/train.py --base-url http://127.0.0.1:8000 --base-model MODEL

`EXAMPLES` stands for your data; a few dozen rows like these already show in the held-out loss.
"""

import argparse
import os
from typing import Any

import numpy as np
import tinker
from tinker import types

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Austria": "Vienna",
    "Norway": "Oslo",
    "Poland": "Warsaw",
    "Greece": "Athens",
    "Portugal": "Lisbon",
}
EXAMPLES = [(f"The capital of {land} is", f" {city}.") for land, city in CAPITALS.items()]
HELD_OUT = 2  # examples that are not trained on
BATCH = 3


def datum(tokenizer: Any, prompt: str, answer: str) -> types.Datum:
    """Make a datum: position i of the input predicts target i; tokens with weight 0 are not learned."""
    asked, answered = tokenizer.encode(prompt), tokenizer.encode(answer)
    tokens = [*asked, *answered]
    weights = [0.0] * (len(asked) - 1) + [1.0] * len(answered)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:])),
            "weights": types.TensorData.from_numpy(np.array(weights, np.float32)),
        },
    )


def loss_per_token(output: types.ForwardBackwardOutput, data: list[types.Datum]) -> float:
    """Divide the loss, which the server sums over all tokens, by their weight."""
    learned = sum(float(each.loss_fn_inputs["weights"].to_numpy().sum()) for each in data)
    return output.metrics["loss:sum"] / learned


def train(
    trainer: tinker.TrainingClient, data: list[types.Datum], epochs: int, learning_rate: float
) -> list[float]:
    """Take one optimizer step per batch; return the losses before each, in nats per learned token."""
    batches = [data[start : start + BATCH] for start in range(0, len(data), BATCH)] * epochs
    sent = []
    for number, batch in enumerate(batches):
        rate = learning_rate * (1 - number / len(batches))  # the schedule is the client's, too
        gradient = trainer.forward_backward(batch, "cross_entropy")
        update = trainer.optim_step(types.AdamParams(learning_rate=rate, grad_clip_norm=1.0))
        sent.append((gradient, update, batch))
    losses = []
    for gradient, update, batch in sent:  # awaited late, so that the server always has something to do
        losses.append(loss_per_token(gradient.result(), batch))
        update.result()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--base-model", required=True, help="as the server knows it")
    parser.add_argument("--learning-rate", type=float, default=0.003)
    parser.add_argument("--epochs", type=int, default=4)
    arguments = parser.parse_args()

    key = os.environ.get("TINKER_API_KEY", "tml-local")
    with tinker.ServiceClient(base_url=arguments.base_url, api_key=key) as service:
        trainer = service.create_lora_training_client(arguments.base_model, rank=8, seed=0).result()
        tokenizer: Any = trainer.get_tokenizer()
        data = [datum(tokenizer, prompt, answer) for prompt, answer in EXAMPLES]
        trained, held_out = data[:-HELD_OUT], data[-HELD_OUT:]

        before = loss_per_token(trainer.forward(held_out, "cross_entropy").result(), held_out)
        losses = train(trainer, trained, arguments.epochs, arguments.learning_rate)
        after = loss_per_token(trainer.forward(held_out, "cross_entropy").result(), held_out)
        print(f"trained on: {losses[0]:.3f} -> {losses[-1]:.3f} nats per token")
        print(f"held out:   {before:.3f} -> {after:.3f} nats per token")

        # Weights, moments and step count: training goes on as if it had never been interrupted.
        path = trainer.save_state("capitals", ttl_seconds=24 * 3600).result().path
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        again = loss_per_token(resumed.forward(held_out, "cross_entropy").result(), held_out)
        print(f"resumed from {path}: held out {again:.3f}")

        sampler = resumed.save_weights_and_get_sampling_client().result()
        prompt = types.ModelInput.from_ints(tokenizer.encode("The capital of Greece is"))
        greedy = types.SamplingParams(max_tokens=8, temperature=0.0)
        answer = sampler.sample(prompt, num_samples=1, sampling_params=greedy).result().sequences[0]
        print("the model says: The capital of Greece is" + tokenizer.decode(answer.tokens))


if __name__ == "__main__":
    main()
