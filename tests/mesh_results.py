"""What a tiny model's steps bring on one mesh, by name: to be compared between meshes and processes."""

import numpy as np

from tests.tiny_engine import named_factors, random_adapters, random_datum, tiny_engine
from tests.tiny_sampler import PAGE_SIZE, Sample, random_prompt, run, stand, tiny_sampler

SAMPLES = [
    Sample(random_prompt(1, 13), slot=1, seed=(7, 9)),
    Sample(random_prompt(3, PAGE_SIZE * 3), slot=0, seed=(7, 9)),
]
LOSSES = ("cross_entropy", "importance_sampling", "ppo")


def results(shape: tuple[int, int, int], kind: str, split_base: bool) -> dict[str, np.ndarray]:
    """Losses, log-probabilities and gradients of eight rows, and what two samples draw."""
    engine = tiny_engine(shape, kind=kind, split_base=split_base)
    rows = [(random_datum(row, row % 3, 64 - row, LOSSES[row % 3]),) for row in range(8)]
    gradient = engine.forward_backward(random_adapters(1, engine.model), rows)
    sampler = tiny_sampler(shape, kind=kind, split_base=split_base).reset()
    drawn = run(sampler, stand(SAMPLES, shards=sampler.data_shards))
    found = {"logprobs": gradient.logprobs, "losses": gradient.losses}
    found |= {f"gradient {name}": factor for name, factor in named_factors(gradient.grad_sum).items()}
    for number, sample in enumerate(drawn):
        found |= {f"tokens {number}": sample.tokens, f"sampled {number}": sample.logprobs}
    return found
