"""What the logits in transformers_logits.npz are of. The models and adapters are made again from their seeds.

For each case the file holds ``<name>/tokens`` int32 [T], ``<name>/rows`` int32 [n] (positions in it) and
``<name>/logits`` float32 [n, V]: what transformers answers at those positions.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from spmd_tx.demo.tiny_model import Spec
from spmd_tx.models.adapters.lora import Adapters, Lora, for_maps, shapes
from spmd_tx.models.declared.model import Model
from spmd_tx.protocol.commands import AdapterSpec

LOGITS = Path(__file__).parent / "transformers_logits.npz"

# Larger weights than a fresh model's, so that attention and norms are far from uniform.
GROUPED = Spec(n_layers=2, d_model=32, n_kv_heads=2, d_ff=48, vocab_size=272, tied=False, std=0.2)
TIED = Spec(n_layers=3, d_model=48, n_heads=8, n_kv_heads=8, d_ff=64, vocab_size=272, tied=True, std=0.2)
LONG = Spec(
    n_layers=2, d_model=32, n_kv_heads=4, d_ff=48, vocab_size=272, tied=False, std=0.2, rope_theta=5e6
)
MIXTURE = Spec(
    n_layers=2,
    d_model=32,
    n_kv_heads=2,
    d_ff=24,
    vocab_size=272,
    tied=False,
    std=0.2,
    n_experts=8,
    experts_per_token=3,
)
UNNORMALIZED = replace(MIXTURE, experts_per_token=2, normalize_expert_weights=False, tied=True)


@dataclass(frozen=True)
class Case:
    """A model made by tiny_model.write, with an adapter or without, and the tokens it reads."""

    spec: Spec
    length: int  # tokens
    rows: tuple[int, ...]
    seed: int
    adapter: AdapterSpec | None = None
    expert_lora: str = "shared-outer"

    @property
    def tokens(self) -> np.ndarray:
        return np.random.default_rng(self.seed).integers(0, self.spec.vocab_size, self.length, dtype=np.int32)


CASES = {
    "grouped": Case(GROUPED, 48, (0, 1, 2, 15, 16, 30, 46, 47), seed=1),
    "tied": Case(TIED, 48, (0, 1, 2, 15, 16, 30, 46, 47), seed=2),
    "long": Case(LONG, 1500, (0, 1, 511, 512, 1023, 1024, 1498, 1499), seed=3),
    "adapter": Case(
        GROUPED, 48, (0, 1, 2, 15, 16, 30, 46, 47), seed=4, adapter=AdapterSpec(rank=4, alpha=6.0)
    ),
    "tied_adapter": Case(
        TIED, 48, (0, 1, 2, 15, 16, 30, 46, 47), seed=5, adapter=AdapterSpec(rank=3, alpha=6.0)
    ),
    "attention_adapter": Case(
        GROUPED, 48, (1, 16, 47), seed=6, adapter=AdapterSpec(rank=4, train_mlp=False, train_unembed=False)
    ),
    "mixture": Case(MIXTURE, 48, (0, 1, 2, 15, 16, 30, 46, 47), seed=7),
    "unnormalized_mixture": Case(UNNORMALIZED, 48, (0, 1, 2, 15, 16, 30, 46, 47), seed=8),
    "mixture_adapter": Case(
        MIXTURE,
        48,
        (0, 1, 2, 15, 16, 30, 46, 47),
        seed=9,
        adapter=AdapterSpec(rank=7, alpha=6.0),
        expert_lora="per-expert",
    ),
    "shared_mixture_adapter": Case(
        MIXTURE, 48, (0, 1, 2, 15, 16, 30, 46, 47), seed=10, adapter=AdapterSpec(rank=7, alpha=6.0)
    ),
}


def random_adapters(model: Model, adapter: AdapterSpec, seed: int) -> Adapters[np.ndarray]:
    """Factors [L, r, width] of exactly the adapter's rank, unpadded; groups not trained are random too."""
    random = np.random.default_rng(seed)

    def pair(name: str) -> Lora[np.ndarray]:
        its = shapes(model, name, adapter.rank)
        return Lora(*(0.2 * random.standard_normal(shape).astype(np.float32) for shape in (its.a, its.b)))

    return for_maps(model, pair)
