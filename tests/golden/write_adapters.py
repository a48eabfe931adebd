"""Writes transformers_adapters.npz, or some of its cases. Needs torch and transformers.

Usage: python -m tests.golden.write_adapters [FAMILY ...]

An adapter is added to the weights, so that transformers needs to know nothing of adapters. The gradients of
the weights lead to those of the factors. They are written as a checkpoint is, which takes apart what
transformers has fused in memory.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.golden.adapter_cases import (
    ADAPTERS,
    CASES,
    GREEDY,
    HEAD_TENSOR,
    Case,
    gradients,
    merge,
    summary,
    text,
)
from tests.golden.families import CONFIGS, write


def stored(model: Any, directory: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a model under the names that its checkpoint has."""
    model.save_pretrained(directory)
    return {name: x for file in directory.glob("*.safetensors") for name, x in load_file(file).items()}


def merged(case: Case, directory: Path) -> Path:
    """Write the model with its adapter. Its head is one of its own, since tied embeddings have no adapter."""
    path = write(directory, case.family)
    tensors = load_file(path / "model.safetensors")
    model = case.model
    tensors.setdefault(HEAD_TENSOR, tensors[model.embed.name].copy())
    merge(case, tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(CONFIGS[case.family] | {"tie_word_embeddings": False}))
    return path


def loaded(case: Case, directory: Path) -> Any:
    path = merged(case, directory / "merged")
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model, report = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True, **how
    )
    if problems := {key: found for key, found in report.items() if found}:
        raise SystemExit(f"{case.name}: {problems}")
    was, now = load_file(path / "model.safetensors"), stored(model, directory / "again")
    if was.keys() != now.keys() or any(not np.array_equal(was[name], now[name]) for name in was):
        raise SystemExit(f"{case.name}: transformers does not write the checkpoint that it has read")
    return model.eval()


def logprobs(model: Any, sequence: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(model(sequence[None], use_cache=False).logits[0], dim=-1)


def results(case: Case, directory: Path) -> dict[str, np.ndarray]:
    model, sequence = loaded(case, directory), torch.from_numpy(text(case).astype(np.int64))
    of_text = logprobs(model, sequence[:-1])[torch.arange(len(sequence) - 1), sequence[1:]]
    (-(of_text * torch.from_numpy(case.loss_weights)).sum()).backward()
    found = {"logprobs": of_text.detach().numpy()} | greedy(case, model, sequence)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    for name, gradient in gradients(case, stored(model, directory / "gradients")).items():
        found[name] = summary(name, gradient)
    return {f"{case.name}/{name}": array for name, array in found.items()}


def greedy(case: Case, model: Any, sequence: torch.Tensor) -> dict[str, np.ndarray]:
    drawn, margins, first = [], [], len(sequence)
    with torch.no_grad():
        for _ in range(GREEDY):
            best = torch.topk(logprobs(model, sequence)[-1], 2)
            margins.append((best.values[0] - best.values[1]).item())
            drawn.append(best.values[0].item())
            sequence = torch.cat([sequence, best.indices[:1]])
    print(case.name, f"the smallest margin of {GREEDY} tokens is {min(margins):.4f} nats")
    return {
        "greedy": sequence[first:].numpy().astype(np.int32),
        "greedy_logprobs": np.array(drawn, np.float32),
    }


def main() -> None:
    names = sys.argv[1:]
    arrays = dict(np.load(ADAPTERS)) if names else {}
    for case in CASES:
        if not names or case.family in names:
            with tempfile.TemporaryDirectory() as directory:
                arrays |= results(case, Path(directory))
    np.savez_compressed(ADAPTERS, **arrays)


if __name__ == "__main__":
    main()
