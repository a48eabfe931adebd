"""Writes the models of the benchmarks, with random weights: python -m tools.bench.models NAME DIRECTORY"""

import sys
from pathlib import Path

from spmd_tx.demo import tiny_model

SPECS = {
    "tiny": tiny_model.Spec(
        n_layers=4,
        d_model=256,
        n_heads=4,
        n_kv_heads=2,
        head_dim=64,
        d_ff=768,
        vocab_size=2048,
        max_positions=4096,
    ),
    "small": tiny_model.Spec(
        n_layers=12,
        d_model=512,
        n_heads=8,
        n_kv_heads=4,
        head_dim=128,
        d_ff=2048,
        vocab_size=8192,
        max_positions=4096,
        tied=False,
        std=0.03,
    ),
}


def write(name: str, directory: Path) -> Path:
    """Write the model, unless it is there, and return its directory."""
    path = directory / name
    if not (path / "model.safetensors").exists():
        tiny_model.write(path, SPECS[name])
    return path


if __name__ == "__main__":
    print(write(sys.argv[1], Path(sys.argv[2])))
