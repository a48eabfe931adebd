"""One layer's weights and adapters, and how a pass applies its maps and norms.

Dimension key as in backbone.py.
"""

from dataclasses import dataclass

import jax
from jax import Array

from spmd_tx.models.adapters.lora import Lora
from spmd_tx.models.checkpoint.packed import Matrix, Packed, decoded
from spmd_tx.models.declared.layers import Norm, StackPlace
from spmd_tx.models.declared.model import Model
from spmd_tx.models.experts import moe
from spmd_tx.models.forward_pass import Pass
from spmd_tx.models.gates import zero_centred_norm
from spmd_tx.models.layers import rms_norm
from spmd_tx.models.named import Named


@dataclass(frozen=True)
class LayerPass:
    """Holds the weights and adapters of one layer, and the pass that runs it."""

    model: Model
    place: StackPlace
    w: Named[Array]
    lora: Named[Lora[Array]]  # of maps in ``stack``, too, those of all repetitions
    how: Pass
    stack: moe.Matrices  # matrices that are read where those of all repetitions are stacked,
    number: Array | None  # and which of them is this layer's; None: there are none

    def linear(self, x: Array, name: str, width_out: int) -> Array:
        """Apply a map without its bias."""
        if name in self.stack:
            matrices, run = self.stack[name], self.how.stacked_map
            assert self.number is not None
            assert run is not None
            assert not isinstance(matrices, Packed), "they are not read in place"
            return run(x[:, 0], matrices, self.lora[name], self.number)[:, None]
        y = self._multiply(x, self.w[name], width_out)
        return y + self.how.apply_lora(x, self.lora[name]) if name in self.lora else y

    def _multiply(self, x: Array, matrix: Matrix, width_out: int) -> Array:
        def run(x: Array, matrix: Matrix) -> Array:
            return self.how.linear(x, decoded(matrix, x.dtype), width_out)

        if isinstance(matrix, Packed) and self.how.remat == "none":  # which would keep what is decoded
            run = jax.checkpoint(run, prevent_cse=False)
        return run(x, matrix if isinstance(matrix, Packed) else self.how.as_stored(matrix))

    def norm(self, x: Array, name: str) -> Array:
        """Apply one of the layer's norms over the model width; return all T on every device."""
        return self.how.gather(norm(x, self.w[name], self.place.layer.norm))

    def columns(self, x_BTI: Array, name: str) -> Array:
        """Apply a map whose outputs tp splits; return this device's [B, T, O]."""
        width = (self.stack[name] if name in self.stack else self.w[name]).shape[-1]
        return self.biased(self.linear(x_BTI, name, width), name)

    def rows(self, x_BTI: Array, name: str) -> Array:
        """Apply a map whose inputs tp splits; return the sum over tp [B, T, D], as ``Pass.reduce`` does."""
        return self.biased(self.how.reduce(self.linear(x_BTI, name, self.model.d_model)), name)

    def biased(self, y_BTO: Array, name: str) -> Array:
        """Add the bias of a map, if it has one."""
        return y_BTO + self.w[f"{name}_bias"][None, None] if f"{name}_bias" in self.w else y_BTO


def norm(x: Array, weight: Array, declared: Norm) -> Array:
    """Apply a norm over the model width."""
    return (zero_centred_norm if declared.is_zero_centred else rms_norm)(x, weight, declared.eps)
