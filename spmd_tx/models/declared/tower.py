"""The vision tower, which makes tokens of an image: a transformer over patches, and a merger of neighbours.

It is that of Qwen3-VL, Qwen3.5 and later. No adapter belongs to it, and it is never trained.
"""

import re
from dataclasses import dataclass

from spmd_tx.models.declared.layers import LayerArray
from spmd_tx.models.declared.maps import Map, Parameter, TensorSource, bias_of, linear, norm_of
from spmd_tx.models.declared.unread import Unread

PATCH = 16  # pixels of a patch's side
MERGE = 2  # patches of a side that become one token
CHANNELS, FRAMES = 3, 2  # of a patch's kernel; both frames of an image are the same picture
PATCH_NUMBERS = CHANNELS * PATCH**2  # numbers of a patch, by channel, row and column
MERGED = MERGE**2  # patches of a token


@dataclass(frozen=True)
class Tower:
    """Declares a tower by its sizes."""

    depth: int  # blocks
    width: int
    inner: int  # width of a block's feed-forward part
    heads: int
    side: int  # of the square table of learned positions
    out: int  # width of a token: the text model's
    deep: tuple[int, ...] = ()  # blocks behind which a merger makes tokens for one of the first layers each
    prefix: str = "model.visual."  # of the names of its tensors

    @property
    def planes(self) -> int:
        """How many vectors make up an image token: that of the embedding, and one for each deep merger."""
        return 1 + len(self.deep)

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def once(self) -> tuple[LayerArray, ...]:
        """The arrays outside blocks: of patches, of positions and of the merger."""
        embed, merger = f"{self.prefix}patch_embed.proj", f"{self.prefix}merger."
        kernel = (self.width, CHANNELS, FRAMES, PATCH, PATCH)
        positions = TensorSource(f"{self.prefix}pos_embed.weight")
        return (
            Parameter("patch", kernel, TensorSource(f"{embed}.weight")),
            Parameter("patch_bias", (self.width,), TensorSource(f"{embed}.bias")),
            Parameter("positions", (self.side**2, self.width), positions),
            *_norm("norm", f"{merger}norm", self.width),
            *self._merger(merger),
        )

    @property
    def block(self) -> tuple[LayerArray, ...]:
        """The arrays of a block, whose names have "{layer}"."""
        at, width = f"{self.prefix}blocks.{{layer}}.", self.width
        return (
            *_norm("attention_norm", f"{at}norm1", width),
            *_map("qkv", width, 3 * width, f"{at}attn.qkv"),
            *_map("o", width, width, f"{at}attn.proj"),
            *_norm("mlp_norm", f"{at}norm2", width),
            *_map("up", width, self.inner, f"{at}mlp.linear_fc1"),
            *_map("down", self.inner, width, f"{at}mlp.linear_fc2"),
        )

    @property
    def deep_merger(self) -> tuple[LayerArray, ...]:
        """The arrays of a deep merger, whose names have "{layer}"; its norm is behind the joining."""
        at = f"{self.prefix}deepstack_merger_list.{{layer}}."
        return (*_norm("norm", f"{at}norm", MERGED * self.width), *self._merger(at))

    def _merger(self, at: str) -> tuple[LayerArray, ...]:
        joined = MERGED * self.width
        return (
            *_map("up", joined, joined, f"{at}linear_fc1"),
            *_map("down", joined, self.out, f"{at}linear_fc2"),
        )

    @property
    def unread(self) -> Unread:
        """The tensors of a checkpoint that are not the tower's."""
        return Unread((f"(?!{re.escape(self.prefix)}).*",))


def _norm(name: str, module: str, width: int) -> tuple[Parameter, Parameter]:
    return (
        norm_of(name, width, module),
        Parameter(f"{name}_bias", (width,), TensorSource(f"{module}.bias")),
    )


def _map(name: str, width_in: int, width_out: int, module: str) -> tuple[LayerArray, ...]:
    declared = Map(name, width_in, width_out, linear(module), bias=TensorSource(f"{module}.bias"))
    bias = bias_of(declared)
    assert bias is not None
    return declared, bias
