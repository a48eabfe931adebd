"""Gated DeltaNet (Yang et al. 2025), as in Qwen3.5: the declaration of a mixer that keeps a state. No JAX."""

from dataclasses import dataclass

from spmd_tx.models.declared.layers import LayerArray
from spmd_tx.models.declared.maps import AdapterGroup, Map, Parameter, TensorSource, linear, norm_of


@dataclass(frozen=True)
class DeltaRule:
    """Declares a layer that keeps one matrix per head of values instead of keys and values per token."""

    k_heads: int  # of queries and of keys; tp splits them
    v_heads: int  # each head of keys serves v_heads / k_heads consecutive heads of values
    k_width: int
    v_width: int
    taps: int  # inputs that the convolution sees, the token's own among them
    eps: float  # of the norm of each head's result
    module: str = "linear_attn"

    pools = 0

    @property
    def keys(self) -> int:
        """The width of all heads of keys side by side."""
        return self.k_heads * self.k_width

    @property
    def values(self) -> int:
        """The width of all heads of values side by side."""
        return self.v_heads * self.v_width

    @property
    def channels(self) -> int:
        """What the convolution runs over: queries, keys and values side by side."""
        return 2 * self.keys + self.values

    def arrays(self, d_model: int, at: str) -> tuple[LayerArray, ...]:
        module = f"{at}{self.module}"
        fused = linear(f"{module}.in_proj_qkv")

        def map_of(
            name: str, width: int, source: TensorSource | None = None, group: AdapterGroup | None = "attn"
        ) -> Map:
            known_as = f"{module}.in_proj_{name}"
            source = source or linear(known_as)
            return Map(name, d_model, width, source, "columns", group, self.k_heads, module=known_as)

        by_head, keys = (self.v_heads,), self.keys
        return (
            map_of("q", keys, fused.part(0, keys)),
            map_of("k", keys, fused.part(keys, 2 * keys)),
            map_of("v", self.values, fused.part(2 * keys, self.channels)),
            map_of("z", self.values),
            map_of("a", self.v_heads, group=None),
            map_of("b", self.v_heads, group=None),
            Parameter("taps", (self.channels, 1, self.taps), TensorSource(f"{module}.conv1d.weight")),
            Parameter("a_log", by_head, TensorSource(f"{module}.A_log"), 0, self.k_heads, is_fp32=True),
            Parameter("dt_bias", by_head, TensorSource(f"{module}.dt_bias"), 0, self.k_heads, is_fp32=True),
            norm_of("norm", self.v_width, f"{module}.norm"),
            Map("out", self.values, d_model, linear(f"{module}.out_proj"), "rows", "attn", self.k_heads),
        )

    @property
    def attended(self) -> None:
        return None

    def state_bytes(self, input_bytes: int) -> int:
        """Return the bytes of one sequence's state of a layer.

        ``input_bytes`` is the size of one number of the compute dtype, in which the convolution's inputs are.
        """
        memory = 4 * self.v_heads * self.k_width * self.v_width
        return memory + input_bytes * (self.taps - 1) * self.channels
