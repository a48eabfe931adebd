"""Writes transformers_families.npz, or the logits of some families in it. Needs torch and transformers.

Usage: python -m tests.golden.write_families [FAMILY ...]
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.golden.families import CONFIGS, LOGITS, ROWS, tokens, write


def logits(name: str, directory: Path) -> np.ndarray:
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    path = write(directory, name)
    model, report = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True, **how
    )
    problems = {key: found for key, found in report.items() if found}
    if problems:
        raise SystemExit(f"{name}: {problems}")
    answer = model.eval()(torch.from_numpy(tokens(name).astype(np.int64))[None]).logits[0]
    return answer[list(ROWS)].numpy()


def main() -> None:
    names = sys.argv[1:]
    arrays = dict(np.load(LOGITS)) if names else {}
    for name in names or CONFIGS:
        with tempfile.TemporaryDirectory() as directory:
            arrays[f"{name}/logits"] = logits(name, Path(directory))
        print(name, f"std {arrays[f'{name}/logits'].std():.3f}")
    np.savez_compressed(LOGITS, **arrays)


if __name__ == "__main__":
    with torch.no_grad():
        main()
