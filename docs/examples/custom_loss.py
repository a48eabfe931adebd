"""Train with a loss of your own, which the server runs (docs/custom_losses.md). Needs torch to trace it."""

import argparse

import tinker
import torch  # pyright: ignore[reportMissingImports]
import torch.nn.functional as F  # noqa: N812  # pyright: ignore[reportMissingImports]
from tinker import types

BETA = 0.1


def preference(
    logprobs: torch.Tensor, chosen: torch.Tensor, rejected: torch.Tensor, reference: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute direct preference optimization; a datum holds both answers, and two masks tell them apart."""
    log_ratio = logprobs - reference
    margin = BETA * ((log_ratio * chosen).sum() - (log_ratio * rejected).sum())
    accuracy = (margin > 0).float()
    return -F.logsigmoid(margin), {"custom/margin:mean": margin, "custom/accuracy:mean": accuracy}


def pair(chosen: list[int], rejected: list[int]) -> types.Datum:
    """Put both answers in one row. The first token of the second answer is not a target."""
    tokens = chosen + rejected
    first = len(chosen) - 1
    masks = {
        "chosen": [1.0] * first + [0.0] * (len(tokens) - 1 - first),
        "rejected": [0.0] * (first + 1) + [1.0] * (len(rejected) - 1),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_torch(torch.tensor(tokens[1:])),
            **{name: types.TensorData.from_torch(torch.tensor(mask)) for name, mask in masks.items()},
        },
    )


def with_reference(trainer: tinker.TrainingClient, data: list[types.Datum]) -> list[types.Datum]:
    """Add the untrained model's log-probabilities to each datum; a fresh adapter changes nothing."""
    plain = [
        types.Datum(
            model_input=datum.model_input,
            loss_fn_inputs={
                "target_tokens": datum.loss_fn_inputs["target_tokens"],
                "weights": datum.loss_fn_inputs["chosen"],
            },
        )
        for datum in data
    ]
    outputs = trainer.forward(plain, "cross_entropy").result().loss_fn_outputs
    return [
        types.Datum(
            model_input=datum.model_input,
            loss_fn_inputs={**datum.loss_fn_inputs, "reference": output["logprobs"]},
        )
        for datum, output in zip(data, outputs, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    service = tinker.ServiceClient(base_url=options.base_url, api_key="tml-local")
    trainer = service.create_lora_training_client(options.base_model, rank=8, seed=0).result()
    ranks = {"logprobs": 1, "chosen": 1, "rejected": 1, "reference": 1}
    loss = service.create_custom_loss(preference, input_ranks=ranks).result()  # pyright: ignore[reportArgumentType]

    tokenizer = trainer.get_tokenizer()
    kinds = [
        ("Yes, of course.", "No."),
        ("Certainly, with pleasure.", "Leave me alone."),
        ("Sure!", "Never."),
    ]
    data = with_reference(trainer, [pair(*map(tokenizer.encode, answers)) for answers in kinds])
    for step in range(options.steps):
        gradient = trainer.forward_backward_custom(data, loss)
        update = trainer.optim_step(types.AdamParams(learning_rate=1e-3))
        update.result()
        metrics = gradient.result().metrics
        print(
            f"step {step}: loss {metrics['loss:sum']:.4f}, margin {metrics['custom/margin:mean']:.4f}, "
            f"accuracy {metrics['custom/accuracy:mean']:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
