"""Gated DeltaNet (Yang et al. 2025), as in Qwen3.5: the declaration of a mixer that keeps a state. No JAX."""

from dataclasses import dataclass

from spmd_tx.models.declared.layers import LayerArray
from spmd_tx.models.declared.maps import AdapterGroup, Map, Parameter, Split, TensorSource, linear


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
        parts = {
            "q": (0, self.keys),
            "k": (self.keys, 2 * self.keys),
            "v": (2 * self.keys, self.channels),
        }

        def map_of(
            name: str,
            width: int,
            source: TensorSource,
            *,
            split: Split = "columns",
            group: AdapterGroup | None = "attn",
        ) -> Map:
            is_out = split == "rows"
            widths = (width, d_model) if is_out else (d_model, width)
            known_as = f"{module}.out_proj" if is_out else f"{module}.in_proj_{name}"
            return Map(name, *widths, source, split, group, heads=self.k_heads, module=known_as)

        by_head, is_frozen = (self.v_heads,), None
        return (
            *(map_of(name, end - start, fused.part(start, end)) for name, (start, end) in parts.items()),
            map_of("z", self.values, linear(f"{module}.in_proj_z")),
            map_of("a", self.v_heads, linear(f"{module}.in_proj_a"), group=is_frozen),
            map_of("b", self.v_heads, linear(f"{module}.in_proj_b"), group=is_frozen),
            Parameter("taps", (self.channels, 1, self.taps), TensorSource(f"{module}.conv1d.weight")),
            Parameter("a_log", by_head, TensorSource(f"{module}.A_log"), 0, self.k_heads, is_fp32=True),
            Parameter("dt_bias", by_head, TensorSource(f"{module}.dt_bias"), 0, self.k_heads, is_fp32=True),
            Parameter("norm", (self.v_width,), TensorSource(f"{module}.norm.weight")),
            map_of("out", self.values, linear(f"{module}.out_proj"), split="rows"),
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
