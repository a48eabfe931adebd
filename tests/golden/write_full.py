"""Writes transformers_full.npz: five steps of torch.optim.AdamW on all weights. Needs torch and transformers.

Usage: python -m tests.golden.write_full
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.golden.families import tokens, write
from tests.golden.full_cases import ADAM, FAMILIES, FULL, STEPS, is_kept


def steps(name: str, directory: Path) -> dict[str, np.ndarray]:
    path = write(directory, name)
    how = {"attn_implementation": "eager", "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(path, **how).eval()
    before = {key: x.detach().clone() for key, x in model.named_parameters()}
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=ADAM["learning_rate"],
        betas=(ADAM["beta1"], ADAM["beta2"]),
        eps=ADAM["eps"],
        weight_decay=ADAM["weight_decay"],
    )
    sequence, losses = torch.from_numpy(tokens(name).astype(np.int64)), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(sequence[None, :-1]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, sequence[1:], reduction="sum")
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM["grad_clip_norm"])
        optimizer.step()
        losses.append(loss.item())
        print(name, f"loss {losses[-1]:.3f}, norm of the gradient {norm:.2f}")
    moved = {key: (x.detach() - before[key]) / ADAM["learning_rate"] for key, x in model.named_parameters()}
    kept = {f"{name}/{key}": x.numpy().astype(np.float16) for key, x in moved.items() if is_kept(key)}
    return kept | {f"{name}/losses": np.array(losses, np.float32)}


def main() -> None:
    arrays = dict[str, np.ndarray]()
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as directory:
            arrays |= steps(name, Path(directory))
    np.savez_compressed(FULL, **arrays)


if __name__ == "__main__":
    main()
