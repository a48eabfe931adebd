"""The plain model: a stack of equal layers, as Qwen3 has them. Its sizes declare it."""

from dataclasses import dataclass

from spmd_tx.models.declared.channels import Glu, Mixture
from spmd_tx.models.declared.layers import Channel, Cycle, Layer, Norm
from spmd_tx.models.declared.mixers import Softmax
from spmd_tx.models.declared.model import Model
from spmd_tx.models.declared.rope import Rope
from spmd_tx.models.declared.route import Route


@dataclass(frozen=True, kw_only=True)
class PlainSizes:
    """Holds the sizes that declare a plain model."""

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
