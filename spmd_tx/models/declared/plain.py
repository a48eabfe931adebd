"""The plain model: a stack of equal layers, as Qwen3 has them. Its sizes declare it."""

from spmd_tx.models.declared.channels import Glu, Mixture
from spmd_tx.models.declared.layers import Channel, Cycle, Layer, Norm
from spmd_tx.models.declared.mixers import Softmax
from spmd_tx.models.declared.model import Model
from spmd_tx.models.declared.rope import Rope
from spmd_tx.models.declared.route import Route


def plain_model(
    *,
    architecture: str,
    vocab_size: int,
    d_model: int,
    d_ff: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    rope: Rope,
    rms_norm_eps: float,
    tied_embeddings: bool,
    max_positions: int,
    n_experts: int = 0,
    experts_per_token: int = 0,
    normalize_expert_weights: bool = False,
) -> Model:
    """Return the declaration of a model of these sizes."""
    mixer = Softmax(n_heads, n_kv_heads, head_dim, rope, rms_norm_eps, qk_norm=True)
    channel: Channel = Glu(d_ff)
    if n_experts:
        route = Route("softmax", normalise=normalize_expert_weights)
        channel = Mixture(n_experts, experts_per_token, d_ff, route)
    norm = Norm(rms_norm_eps)
    return Model(
        architecture=architecture,
        vocab_size=vocab_size,
        d_model=d_model,
        stack=(Cycle((Layer(mixer, channel, norm),), n_layers),),
        norm=norm,
        max_positions=max_positions,
        is_tied=tied_embeddings,
    )
