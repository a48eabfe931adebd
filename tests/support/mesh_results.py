"""Computes a tiny model's steps on one mesh, to compare them between meshes and processes."""

import tempfile
from pathlib import Path

import numpy as np

from spmd_tx.worker.idle_adapters import IdleAdapters
from spmd_tx.worker.steps.swap import make_swap_steps
from tests.support.tiny_engine import (
    TinyEngine,
    named_factors,
    random_adapters,
    random_arrays,
    random_datum,
    slot_of,
    tiny_engine,
    to_numpy,
)
from tests.support.tiny_sampler import PAGE_SIZE, Sample, random_prompt, run, stand, tiny_sampler

SAMPLES = [
    Sample(random_prompt(1, 13), slot=1, seed=(7, 9)),
    Sample(random_prompt(3, PAGE_SIZE * 3), slot=0, seed=(7, 9)),
]
LOSSES = ("cross_entropy", "importance_sampling", "ppo")


def results(shape: tuple[int, int, int], kind: str, split_base: bool) -> dict[str, np.ndarray]:
    """Return losses, log-probabilities and gradients of eight rows, and the tokens of two samples."""
    engine = tiny_engine(shape, kind=kind, split_base=split_base)
    rows = [(random_datum(row, row % 3, 64 - row, LOSSES[row % 3]),) for row in range(8)]
    gradient = engine.forward_backward(random_adapters(1, engine.model), rows)
    sampler = tiny_sampler(shape, kind=kind, split_base=split_base).reset()
    drawn = run(sampler, stand(SAMPLES, shards=sampler.data_shards))
    found = {"logprobs": gradient.logprobs, "losses": gradient.losses}
    found |= {f"gradient {name}": factor for name, factor in named_factors(gradient.grad_sum).items()}
    for number, sample in enumerate(drawn):
        found |= {f"tokens {number}": sample.tokens, f"sampled {number}": sample.logprobs}
    if kind == "dense":
        found |= swapped(engine)
    return found


def swapped(engine: TinyEngine) -> dict[str, np.ndarray]:
    """Return slot 3 after the state of slot 1 was swapped out to disk and back in there."""
    steps = make_swap_steps(engine.mesh, engine.declared_train)
    state = engine.place(random_arrays(engine.declared_train, seed=6), engine.declared_train)
    with tempfile.TemporaryDirectory() as folder:
        idle = IdleAdapters(Path(folder) / "idle", 0)
        idle.put("ours", steps.out(state, np.int32(1)))
        idle.settle()
        vector, is_from_disk = idle.take("ours")
        idle.settle()
    assert is_from_disk
    after = to_numpy(steps.back(state, vector, np.int32(3)))
    parts = {"w": after.w, "grad_sum": after.grad_sum, "mu": after.mu, "nu": after.nu}
    factors = {name: named_factors(slot_of(part, 3)) for name, part in parts.items()}
    return {f"swapped {part}{name}": leaf for part, each in factors.items() for name, leaf in each.items()}
