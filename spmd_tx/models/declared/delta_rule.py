"""The sizes of a Gated DeltaNet layer (Yang et al. 2025), as in Qwen3.5 and Qwen3-Next. No JAX."""

from dataclasses import dataclass

from spmd_tx.errors import StartError


@dataclass(frozen=True)
class DeltaRule:
    """Holds the sizes of a layer that keeps a matrix per head of values, not keys and values per token."""

    k_heads: int  # of queries and of keys
    v_heads: int  # each head of keys serves v_heads / k_heads consecutive heads of values
    k_width: int
    v_width: int
    taps: int  # inputs that the convolution sees, the token's own among them

    def __post_init__(self) -> None:
        if self.v_heads % self.k_heads:
            raise StartError(
                f"linear_num_value_heads {self.v_heads} is no multiple of linear_num_key_heads {self.k_heads}"
            )
        if self.taps < 2:
            raise StartError(f"linear_conv_kernel_dim is {self.taps}; at least 2 are needed")

    @property
    def group(self) -> int:
        """Heads of values per head of keys."""
        return self.v_heads // self.k_heads

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

    def check_split(self, tp: int) -> None:
        """Raise StartError if the heads of keys cannot be split over ``tp`` devices."""
        if self.k_heads % tp:
            raise StartError(
                f"the model's linear layers have {self.k_heads} heads of keys, "
                f"which --tensor-parallel-size {tp} does not divide"
            )

    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what one sequence keeps of a layer, by the names of state_pool.States."""
        return {
            "memory": (self.v_heads, self.k_width, self.v_width),
            "inputs": (self.taps - 1, self.channels),
        }

    def state_bytes(self, input_bytes: int) -> int:
        """Return the bytes of one sequence's state of a layer. The memory is float32.

        ``input_bytes`` is the size of one number of the compute dtype, in which the convolution's inputs are.
        """
        memory = 4 * self.v_heads * self.k_width * self.v_width
        return memory + input_bytes * (self.taps - 1) * self.channels

    def flops_per_token(self, chunk: int) -> int:
        """Return the operations per token of a layer without its linear maps, read in chunks.

        Two products of a chunk with itself per head of keys; per head of values four with the state or within
        the chunk, and the inverse.
        """
        per_key_head = 4 * chunk * self.k_width
        per_value_head = 6 * self.k_width * self.v_width + 4 * chunk * self.v_width + 2 * chunk * chunk
        return self.k_heads * per_key_head + self.v_heads * per_value_head
