"""Writes a model of the benchmarks, with random weights: python -m tools.bench.models small DIRECTORY"""

import argparse
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SPECS)
    parser.add_argument("directory", type=Path, help="that gets a folder of this name")
    options = parser.parse_args()
    print(write(options.name, options.directory))


if __name__ == "__main__":
    main()
