"""Runs losses with the real SDK against a server, there and in the client, and compares.

Needs torch and tinker, as in the environment of `make cookbook`; test_both_ways.py starts it. Prints one line
of JSON per loss: the largest differences of metrics, logprobs, and logprobs after an optimizer step.
"""

import dataclasses
import json
import sys

import tinker
import torch
from tinker import types

from tests.custom_loss.torch_losses import LOSSES, K, random_input

SECONDS = 300
LENGTHS = (5, 40, 12)


def as_tensor_data(tensor: torch.Tensor) -> types.TensorData:
    return types.TensorData.from_torch(tensor)


def datums(ranks: dict[str, int]) -> list[types.Datum]:
    generator = torch.Generator().manual_seed(3)
    data = []
    for tokens in LENGTHS:
        shape = (tokens,) if ranks["logprobs"] == 1 else (tokens, K)
        inputs = {
            name: as_tensor_data(random_input(name, rank, tokens, generator))
            for name, rank in ranks.items()
            if name != "logprobs"
        }
        targets = torch.randint(1, 200, shape, generator=generator)
        prompt = torch.randint(1, 200, (tokens,), generator=generator).tolist()
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(prompt),
                loss_fn_inputs={"target_tokens": as_tensor_data(targets)} | inputs,
            )
        )
    return data


def largest_difference(one: dict, other: dict) -> float:
    """Relative to the larger of the value and 1; infinite for what only one of them has."""
    if one.keys() != other.keys():
        return float("inf")
    return max(abs(one[key] - other[key]) / max(1.0, abs(other[key])) for key in one)


def logprobs(outputs) -> torch.Tensor:
    return torch.cat([output["logprobs"].to_torch().flatten() for output in outputs])


def run(trainer: tinker.TrainingClient, data: list[types.Datum], handle):
    """The result of the loss, and the logprobs after a step that is proportional to its gradient."""
    gradient = trainer.forward_backward_custom(data, handle)
    adam = types.AdamParams(learning_rate=0.05, eps=10.0)
    step = trainer.optim_step(adam)
    plain = [
        types.Datum(
            model_input=datum.model_input,
            loss_fn_inputs={
                "target_tokens": datum.loss_fn_inputs["target_tokens"],
                "weights": as_tensor_data(
                    torch.zeros(datum.loss_fn_inputs["target_tokens"].to_torch().shape)
                ),
            },
        )
        for datum in data
    ]
    after = trainer.forward(plain, "cross_entropy")
    norm = step.result(SECONDS).metrics["unclipped_grad_l2:mean"]
    return gradient.result(SECONDS), norm, logprobs(after.result(SECONDS).loss_fn_outputs)


def main(url: str, model: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key="tml-test")
    for loss, ranks in LOSSES.items():
        handle = service.create_custom_loss(loss, input_ranks=ranks).result(SECONDS)
        assert handle.loss_id is not None, "the server does not take custom losses"
        data = datums(ranks)
        ways = []
        for used in (handle, dataclasses.replace(handle, loss_id=None)):
            trainer = service.create_lora_training_client(model, rank=4, seed=1).result(SECONDS)
            ways.append(run(trainer, data, used))
        (here, norm, after), (there, its_norm, its_after) = ways
        print(
            json.dumps(
                {
                    "loss": loss.__name__,
                    "metrics": largest_difference(here.metrics, there.metrics),
                    "names": sorted(here.metrics),
                    "logprobs": (logprobs(here.loss_fn_outputs) - logprobs(there.loss_fn_outputs))
                    .abs()
                    .max()
                    .item(),
                    "gradient_norm": abs(norm - its_norm) / max(1e-3, its_norm),
                    "after": (after - its_after).abs().max().item(),
                    "moved": (after - logprobs(here.loss_fn_outputs)).abs().max().item(),
                }
            ),
            flush=True,
        )
    service.close("success").result(SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
