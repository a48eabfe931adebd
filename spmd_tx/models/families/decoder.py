"""What the config.json of every decoder-only model with grouped queries says, and declares of it."""

from dataclasses import dataclass
from typing import Any

from spmd_tx.models.declared.layers import Cycle, Layer, Norm, Stack
from spmd_tx.models.declared.mixers import Softmax
from spmd_tx.models.declared.model import Model
from spmd_tx.models.declared.rope import Rope
from spmd_tx.models.families.keys import ConfigKeys, Refusal


@dataclass(frozen=True)
class DecoderSizes:
    """Holds the sizes of such a model."""

    architecture: str
    vocab_size: int
    d_model: int
    n_layers: int
    heads: int
    kv_heads: int
    head_width: int
    norm: Norm
    is_tied: bool
    positions: int  # of the config.json, which says of some ropes only how many there were before scaling

    def attention(self, rope: Rope, **options: Any) -> Softmax:
        """Declare attention, with further fields of Softmax."""
        return Softmax(self.heads, self.kv_heads, self.head_width, rope, self.norm.eps, **options)

    def model(self, layers: Layer | Stack, rope: Rope, **options: Any) -> Model:
        """Declare the model, with further fields of Model; one layer is what all are."""
        return Model(
            architecture=self.architecture,
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            stack=(Cycle((layers,), self.n_layers),) if isinstance(layers, Layer) else layers,
            norm=self.norm,
            max_positions=rope.most_positions(self.positions),
            is_tied=self.is_tied,
            **options,
        )


def read_sizes(keys: ConfigKeys, *, is_zero_centred: bool = False) -> DecoderSizes:
    """Read the sizes; ``is_zero_centred`` is of the norms. Raises Refusal."""
    heads = keys.count("num_attention_heads")
    kv_heads = keys.count_or("num_key_value_heads", heads)
    if heads % kv_heads:
        raise Refusal(
            f"has {heads} num_attention_heads, not a multiple of its {kv_heads} num_key_value_heads"
        )
    d_model = keys.count("hidden_size")
    return DecoderSizes(
        architecture=keys.raw["architectures"][0],
        vocab_size=keys.count("vocab_size"),
        d_model=d_model,
        n_layers=keys.layers(),
        heads=heads,
        kv_heads=kv_heads,
        head_width=keys.count_or("head_dim", d_model // heads),
        norm=Norm(keys.number("rms_norm_eps"), is_zero_centred),
        is_tied=keys.flag("tie_word_embeddings"),
        positions=keys.count("max_position_embeddings"),
    )
