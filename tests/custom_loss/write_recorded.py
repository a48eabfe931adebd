"""Writes recorded.json.gz: graphs as the SDK uploads them, and what torch makes of them.

Needs torch and tinker, as in the environment of `make cookbook`:
PYTHONPATH=. .venv-cookbook/bin/python -m tests.custom_loss.write_recorded
"""

import gzip
import json
from pathlib import Path

import torch
from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

from tests.custom_loss.torch_losses import LOSSES, random_input
from tests.custom_loss.torch_operations import OPERATIONS

RECORDED = Path(__file__).parent / "recorded.json.gz"
LENGTHS = (5, 33, 32, 3)  # tokens of the datums of each loss; of operations only the first
TOGETHER = 6  # operations per loss

RANKS = {"logprobs": 1, "a": 1, "p": 1, "ids": 1, "k": 2, "s": 0}


def as_loss(operations):
    """A loss that weighs the elements of what each operation gives differently."""

    def loss(logprobs, a, p, ids, k, s):
        total = 0.0
        for operation in operations:
            flat = operation(logprobs, a, p.exp(), ids, k, s).float().reshape(-1)
            total = total + (flat * torch.cos(torch.arange(flat.shape[0]) * 0.7)).sum()
        return total, {"custom/last:sum": flat.sum()}

    return loss


def together(operations: dict) -> dict:
    """A few operations per loss, because each loss costs a compilation."""
    names = list(operations)
    groups = [names[start : start + TOGETHER] for start in range(0, len(names), TOGETHER)]
    return {"+".join(group): [operations[name] for name in group] for group in groups}


def record(name: str, function, ranks: dict[str, int], lengths=LENGTHS) -> dict:
    handle = trace_loss(function, ranks, "session")
    definition = {
        "name": name,
        "inputs": [each.model_dump() for each in handle.inputs],
        "graph": encode_graph(handle).model_dump(exclude_none=True, mode="json"),
    }
    generator = torch.Generator().manual_seed(7)
    data, losses, metrics, gradients = [], [], [], []
    for tokens in lengths:
        tensors = {key: random_input(key, rank, tokens, generator) for key, rank in ranks.items()}
        logprobs = tensors["logprobs"].requires_grad_(True)
        loss, its_metrics = handle.graph(*tensors.values())
        loss.backward()
        data.append({key: tensor.tolist() for key, tensor in tensors.items()})
        losses.append(loss.item())
        metrics.append({key: value.item() for key, value in its_metrics.items()})
        gradients.append(logprobs.grad.tolist())
    return {
        "definition": definition,
        "integers": [key for key, tensor in tensors.items() if not tensor.is_floating_point()],
        "data": data,
        "losses": losses,
        "metrics": metrics,
        "gradients": gradients,
    }


def main() -> None:
    recorded = {
        function.__name__: record(function.__name__, function, ranks) for function, ranks in LOSSES.items()
    }
    for name, operations in together(OPERATIONS).items():
        recorded[f"operations: {name}"] = record(name, as_loss(operations), RANKS, LENGTHS[:1])
    with gzip.GzipFile(RECORDED, "wb", mtime=0) as file:
        file.write(json.dumps(recorded).encode())
    print(f"{len(recorded)} losses, {RECORDED.stat().st_size} bytes")


if __name__ == "__main__":
    main()
