"""Layers and stacks: what a model's layers are, in which order, and where a checkpoint has them.

A mixer combines tokens (attention, a recurrence), a channel works on each token alone (a feed-forward block,
a mixture of experts). Both say which arrays they need; a mixer also says what it keeps of a sequence while it
is sampled.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from spmd_tx.models.declared.maps import Map, Parameter, bias_of, norm_of

LayerArray = Map | Parameter


class Attended(NamedTuple):
    """Says what attention multiplies for each pair of a token and one that it sees: widths of all heads."""

    keys: int
    values: int
    window: int = 0  # tokens that a token sees, itself among them; 0: all before it


@runtime_checkable
class Mixer(Protocol):
    """Defines what the declaration of a mixer says."""

    def arrays(self, d_model: int, at: str) -> tuple[LayerArray, ...]:
        """Return the arrays in the order of computation. ``at`` begins their names in a checkpoint."""
        ...

    @property
    def pools(self) -> int:
        """How many arrays pages have: keys and values, or what is both.

        0: no pages are kept of a sequence, but a state in a slot, which every token changes.
        """
        ...

    @property
    def attended(self) -> Attended | None:
        """What the scores of pairs of tokens cost; None: there are no scores."""
        ...


@runtime_checkable
class Channel(Protocol):
    """Defines what the declaration of a channel says."""

    def arrays(self, d_model: int, at: str) -> tuple[LayerArray, ...]: ...


@dataclass(frozen=True)
class Norm:
    """Declares a root mean square norm over the model width."""

    eps: float
    is_zero_centred: bool = False  # whether it multiplies by 1 + weight


@dataclass(frozen=True)
class Layer:
    """Declares a layer: x += mixer(norm(x)), then x += channel(norm(x))."""

    mixer: Mixer
    channel: Channel | None  # None: the layer is the mixer alone
    norm: Norm
    mixer_norm: str = "input_layernorm"  # the modules of the norms
    channel_norm: str = "post_attention_layernorm"
    adds_image: bool = False  # whether it then adds a deep plane of image tokens: the first layer the first

    def arrays(self, d_model: int, at: str) -> tuple[LayerArray, ...]:
        """Return all arrays of the layer, biases among them, in the order of computation."""
        declared: list[LayerArray] = [
            norm_of("attention_norm", d_model, f"{at}{self.mixer_norm}"),
            *self.mixer.arrays(d_model, at),
        ]
        if self.channel is not None:
            norm = norm_of("mlp_norm", d_model, f"{at}{self.channel_norm}")
            declared += [norm, *self.channel.arrays(d_model, at)]
        biases = [bias_of(array) for array in declared if isinstance(array, Map)]
        return (*declared, *(bias for bias in biases if bias is not None))


@dataclass(frozen=True)
class Cycle:
    """Declares layers that follow one another, so many times."""

    layers: tuple[Layer, ...]
    repeats: int

    @property
    def n_layers(self) -> int:
        return len(self.layers) * self.repeats


Stack = tuple[Cycle, ...]


@dataclass(frozen=True)
class StackPlace:
    """Holds one layer of a cycle, and the numbers of the model's layers that are like it."""

    layer: Layer
    numbers: range
    prefix: str  # of the names of its arrays in the model: "" where all layers are alike, else "0.1."

    def name(self, array: str) -> str:
        return self.prefix + array


def in_cycles(layers: tuple[Layer, ...]) -> Stack:
    """Cut a sequence of layers into cycles: from each place on, the one that covers most layers."""
    cycles: list[Cycle] = []
    start = 0
    while start < len(layers):
        best = Cycle(layers[start : start + 1], 1)
        for length in range(1, (len(layers) - start) // 2 + 1):
            cycle, repeats = layers[start : start + length], 1
            while layers[start + repeats * length : start + (repeats + 1) * length] == cycle:
                repeats += 1
            if repeats > 1 and length * repeats > best.n_layers:
                best = Cycle(cycle, repeats)
        cycles.append(best)
        start += best.n_layers
    return tuple(cycles)
