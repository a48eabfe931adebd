"""Lists the shapes of models for tests and benchmarks: real and tiny ones."""

import math
from dataclasses import dataclass, replace
from typing import Any

from spmd_tx.models.declared.channels import Glu, Mixture
from spmd_tx.models.declared.layers import Channel, Cycle, Layer, Norm
from spmd_tx.models.declared.maps import AdapterGroup
from spmd_tx.models.declared.mixers import Softmax
from spmd_tx.models.declared.model import FACTORS, Model
from spmd_tx.models.declared.rope import Rope
from spmd_tx.models.declared.route import Route


@dataclass(frozen=True, kw_only=True)
class PlainSizes:
    """Holds the sizes that declare a plain model: a stack of equal layers, as Qwen3 has them."""

    architecture: str
    vocab_size: int
    d_model: int
    d_ff: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope: Rope
    rms_norm_eps: float
    tied_embeddings: bool
    max_positions: int
    n_experts: int = 0
    experts_per_token: int = 0
    normalize_expert_weights: bool = False

    def model(self) -> Model:
        """Return the declaration."""
        mixer = Softmax(
            self.n_heads, self.n_kv_heads, self.head_dim, self.rope, self.rms_norm_eps, qk_norm=True
        )
        channel: Channel = Glu(self.d_ff)
        if self.n_experts:
            route = Route("softmax", normalise=self.normalize_expert_weights)
            channel = Mixture(self.n_experts, self.experts_per_token, self.d_ff, route)
        norm = Norm(self.rms_norm_eps)
        return Model(
            architecture=self.architecture,
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            stack=(Cycle((Layer(mixer, channel, norm),), self.n_layers),),
            norm=norm,
            max_positions=self.max_positions,
            is_tied=self.tied_embeddings,
        )


def resized(model: Model, **sizes: Any) -> Model:
    """Return a plain model with other sizes, by the names that PlainSizes has for them."""
    mixture = model.mixture
    same = {
        "architecture": model.architecture,
        "vocab_size": model.vocab_size,
        "d_model": model.d_model,
        "d_ff": model.d_ff,
        "n_layers": model.n_layers,
        "n_heads": model.n_heads,
        "n_kv_heads": model.n_kv_heads,
        "head_dim": model.head_dim,
        "rope": model.attention.rope,
        "rms_norm_eps": model.norm.eps,
        "tied_embeddings": model.is_tied,
        "max_positions": model.max_positions,
        "n_experts": model.n_experts,
        "experts_per_token": model.experts_per_token,
        "normalize_expert_weights": mixture is not None and mixture.route.normalise,
    }
    assert PlainSizes(**same).model() == replace(model, expert_lora="shared-outer"), (
        "its sizes do not say it all"
    )
    return replace(PlainSizes(**same | sizes).model(), expert_lora=model.expert_lora)


def adapter_numbers(model: Model) -> dict[AdapterGroup, int]:
    """Count the numbers of an adapter for a rank of 1, by the flags that train them."""
    totals: dict[AdapterGroup, int] = {"attn": 0, "mlp": 0, "unembed": 0}
    for each in model.adapted.values():
        assert each.map.group is not None
        of_a, of_b = (math.prod(each.lead(factor)) for factor in FACTORS)
        totals[each.map.group] += of_a * each.map.width_in + of_b * each.map.width_out
    return totals


QWEN3_8B = PlainSizes(
    architecture="Qwen3ForCausalLM",
    vocab_size=151936,
    d_model=4096,
    d_ff=12288,
    n_layers=36,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    rope=Rope(1e6),
    rms_norm_eps=1e-6,
    tied_embeddings=False,
    max_positions=40960,
).model()
QWEN3_4B = resized(QWEN3_8B, d_model=2560, d_ff=9728, tied_embeddings=True)
QWEN3_32B = resized(QWEN3_8B, d_model=5120, d_ff=25600, n_layers=64, n_heads=64)
QWEN3_30B_A3B = resized(
    QWEN3_8B,
    architecture="Qwen3MoeForCausalLM",
    d_model=2048,
    d_ff=768,
    n_layers=48,
    n_kv_heads=4,
    n_experts=128,
    experts_per_token=8,
    normalize_expert_weights=True,
)
REAL = {
    "qwen3-4b": QWEN3_4B,
    "qwen3-8b": QWEN3_8B,
    "qwen3-32b": QWEN3_32B,
    "qwen3-30b-a3b": QWEN3_30B_A3B,
}
TINY = resized(
    QWEN3_8B,
    vocab_size=512,
    d_model=64,
    d_ff=128,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    tied_embeddings=True,
    max_positions=512,
)
# The model of the benchmarks' tables: four layers of width 256.
TINY_OF_BENCH = resized(
    TINY, vocab_size=2048, d_model=256, d_ff=768, n_layers=4, head_dim=64, max_positions=4096
)
