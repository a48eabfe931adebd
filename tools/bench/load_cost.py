"""Measures how fast base weights are read, without a server: python -m tools.bench.load_cost --model DIR

Writes a model of 1.7 GB in bfloat16 to DIR if nothing is there, and loads it on one device: gigabytes per
second by the clock and of CPU, with the files in the system's cache. The first time includes the memory that
the system hands out, the second time may find it in the process.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp

import tests.support.engine_setup  # noqa: F401
from spmd_tx.demo import tiny_model
from spmd_tx.models.base_weights import weights
from spmd_tx.models.checkpoint import huggingface
from spmd_tx.models.config import read_model_config
from spmd_tx.sharding.mesh import make_mesh

ROUNDS = 2
READ_BYTES = 1 << 24  # at once
SPEC = tiny_model.Spec(
    n_layers=14,
    d_model=2048,
    n_heads=16,
    n_kv_heads=8,
    head_dim=128,
    d_ff=6144,
    vocab_size=65536,
    dtype="bfloat16",
    n_shards=2,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    options = parser.parse_args()
    if not options.model.exists():
        tiny_model.write(options.model, SPEC)
    size = sum(map(_read, options.model.glob("*.safetensors")))
    mesh = make_mesh(1, 1, 1)
    declared = weights(read_model_config(options.model), mesh, jnp.dtype(options.dtype))
    for _ in range(ROUNDS):
        began_at, spent = time.perf_counter(), time.process_time()
        jax.block_until_ready(huggingface.load(options.model, declared, mesh, lambda message: None))
        seconds, cpu = time.perf_counter() - began_at, time.process_time() - spent
        speeds = f"{size / seconds / 1e9:.2f} GB/s, {size / cpu / 1e9:.2f} GB per second of CPU"
        print(f"{size / 1e9:.1f} GB: {speeds}")


def _read(path: Path) -> int:
    """Read a file so that the system has it in its cache; return its size."""
    with path.open("rb") as file:
        while file.read(READ_BYTES):
            pass
        return file.tell()


if __name__ == "__main__":
    main()
