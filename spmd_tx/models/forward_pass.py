"""What differs between forward passes: attention, adapters, and the traffic between devices."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from spmd_tx.models.adapters.lora import ApplyLora, ExpertAdapters, TakeFactors
from spmd_tx.models.declared.layers import StackPlace
from spmd_tx.models.named import Named
from spmd_tx.models.stack_product import StackedMap
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.collectives import gather, linear, sum_scatter
from spmd_tx.sharding.mesh import TP

# (layer, query [B,T,N,E], key [B,T,K,E], value [B,T,K,E], cache) -> (attended [B,T,N,E], cache); layers with
# sinks or a window pass them by the names that blockwise_attention.attend_segments gives them.
Attend = Callable[..., tuple[Array, Any]]
# Takes a layer's arrays as they are stored, and returns those that it computes with.
TakeWeights = Callable[[StackPlace, Named[Array]], Named[Array]]
TILE = 8, 128  # rows and columns of a tile of a TPU


@dataclass(frozen=True)
class StateSlots:
    """Says in which slots of the pool the rows of a sampling step find and leave their states."""

    sources_B: Array  # int; 0: the row has read nothing
    targets_B: Array  # int; 0: nobody needs the state after the step
    decodes: bool  # whether the step reads one token per row
    # int: how many rows before each row the one is whose sequence it follows, as in Decode.depths. None: no
    # row follows another
    depths_B: Array | None = None


@dataclass(frozen=True)
class Pass:
    """Holds what distinguishes one forward pass: training, prefill or decode."""

    attend: Attend
    apply_lora: ApplyLora
    expert_lora: ExpertAdapters
    kernels: Kernels
    sequence_parallel: bool  # split T over tp between the blocks (Korthikanti et al. 2022)
    remat: str | None = None  # one of REMAT_LEVELS; None: there is no backward pass
    stationary: bool = False  # weights that are split over fsdp stay in place, and the rows travel
    experts: Array | None = None  # int [B, T, L, C]: choices to replay; -1: the router chooses
    take_factors: TakeFactors = lambda factors: factors  # of each layer, before it runs
    take_weights: TakeWeights = lambda place, w: w  # of each layer, before it runs
    # For few rows; None: a layer's matrices are taken out of their stack.
    stacked_map: StackedMap | None = None
    # int [B, T, 3], time, row and column, or [B, T]: what rotates the tokens; None: their positions.
    places: Array | None = None
    segments: Array | None = None  # int [B, T]; 0: padding. Layers with a state need them
    slots: StateSlots | None = None  # None: every row begins with nothing read
    # Takes a plane of images' tokens, and returns what each token has of it (vision/image_tokens.py), to be
    # reduced. The backbone puts it in; None: no token is of an image.
    of_images: Callable[[Array | int], Array] | None = None
    attend_window: Attend | None = None  # of layers that keep a window in slots, while sampling

    def gather(self, x_BTD: Array) -> Array:
        if not self.sequence_parallel or lax.axis_size(TP) == 1:
            return x_BTD
        return gather(x_BTD, TP, 1)

    def reduce(self, partial_BTD: Array) -> Array:
        if self.sequence_parallel and lax.axis_size(TP) == 1:
            return partial_BTD
        if self.sequence_parallel:
            return sum_scatter(partial_BTD, TP, 1)
        return lax.psum(partial_BTD, TP)

    def as_computed(self, y: Array) -> Array:
        """Keep a map's result for one token per row as its product lays it out in memory.

        XLA for TPUs would choose the layout that is best for what comes next, want the map's matrix to fit
        it, and turn each layer's first. A training step loses more without that choice.
        """
        return lax.optimization_barrier(y) if self.stationary and self.kernels.platform == "tpu" else y

    def as_stored(self, kernel: Array) -> Array:
        """Take a layer's matrix [I, O] out of its stack in the layout of the stack, that with less padding.

        XLA for TPUs would choose a layout for the matrix, and copy the stack of all layers' into it first.
        Those of many tokens that tp does not split are left to it: with them programs move up to 7 % more.
        """
        if self.kernels.platform != "tpu" or not (self.stationary or lax.axis_size(TP) > 1):
            return kernel
        of_in, of_out = kernel.shape
        is_turned = _padded(of_out, of_in) < _padded(of_in, of_out)
        return with_layout_constraint(kernel, Layout((1, 0) if is_turned else (0, 1)))

    def linear(self, x: Array, kernel: Array, width_out: int) -> Array:
        return linear(x, kernel, width_out, stationary=self.stationary)


def _padded(rows: int, columns: int) -> int:
    """Return the numbers in the whole tiles of a matrix."""
    return -(-rows // TILE[0]) * -(-columns // TILE[1])
