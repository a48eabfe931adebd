"""The mixer of latent attention (MLA, DeepSeek-AI 2024), as in DeepSeek-V3, Kimi-K2 and GLM-4.7-Flash."""

from dataclasses import dataclass

from spmd_tx.models.declared.layers import Attended, LayerArray
from spmd_tx.models.declared.maps import Map, TensorSource, linear, norm_of
from spmd_tx.models.declared.rope import Rope


@dataclass(frozen=True)
class Latent:
    """Declares attention whose keys and values are expanded from one short vector per token.

    Adapters are of q_a (of q where there is no q_a), kv_a and o. kv_b has none, so that decode can multiply
    queries by it for all adapters alike.
    """

    heads: int
    q_rank: int  # 0: queries are computed from the input at once
    kv_rank: int
    nope: int  # width of a head's key that is not rotated
    rope_width: int  # of the rotated key that all heads share
    value: int  # width of a head's value
    rope: Rope  # over rope_width
    eps: float = 1e-6  # of the two norms within
    biases: bool = False  # of q_a, kv_a and o
    module: str = "self_attn"

    pools = 1  # of one vector for all heads, the same on every device of tp

    @property
    def query_width(self) -> int:
        """The width of a head's query and key."""
        return self.nope + self.rope_width

    @property
    def kv_heads(self) -> int:
        """How many heads pages have."""
        return 1

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return self.query_width**-0.5 * self.rope.score_factor

    @property
    def width(self) -> int:
        """How many numbers a page keeps of a token."""
        return self.kv_rank + self.rope_width

    def arrays(self, d_model: int, at: str) -> tuple[LayerArray, ...]:
        module = f"{at}{self.module}"
        queries, values = self.heads * self.query_width, self.heads * self.value

        def bias(name: str) -> TensorSource | None:
            return TensorSource(f"{module}.{name}.bias") if self.biases else None

        kv_a = linear(f"{module}.kv_a_proj_with_mqa")
        kv_b = linear(f"{module}.kv_b_proj")
        expanded = self.heads * (self.nope + self.value)
        arrays: list[LayerArray] = []
        if self.q_rank:
            q_a, q_b = linear(f"{module}.q_a_proj"), linear(f"{module}.q_b_proj")
            arrays += [
                Map("q_a", d_model, self.q_rank, q_a, group="attn", bias=bias("q_a_proj")),
                norm_of("q_a_norm", self.q_rank, f"{module}.q_a_layernorm"),
                Map("q_b", self.q_rank, queries, q_b, "columns", heads=self.heads),
            ]
        else:
            q = linear(f"{module}.q_proj")
            arrays.append(Map("q", d_model, queries, q, "columns", "attn", heads=self.heads))
        return (
            *arrays,
            Map("kv_a", d_model, self.width, kv_a, group="attn", bias=bias("kv_a_proj_with_mqa")),
            norm_of("kv_a_norm", self.kv_rank, f"{module}.kv_a_layernorm"),
            Map("kv_b", self.kv_rank, expanded, kv_b, "columns", heads=self.heads),
            Map("o", values, d_model, linear(f"{module}.o_proj"), "rows", "attn", bias=bias("o_proj")),
        )

    @property
    def attended(self) -> Attended:
        """The widths in training, which expands keys and values."""
        return Attended(self.heads * self.query_width, self.heads * self.value)
