"""Layers and stacks: what a model's layers are, in which order, and where a checkpoint has them.

A mixer combines tokens (attention, a recurrence), a channel works on each token alone (a feed-forward block,
a mixture of experts). Both say which arrays they need; a mixer also says what it keeps of a sequence while it
is sampled.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from spmd_tx.models.declared.maps import Group, Map, Parameter, Source, bias_of, linear
from spmd_tx.models.declared.unread import Unread

Array = Map | Parameter
Factor = Literal["a", "b"]  # of an adapter: the one that takes the input, and the one that gives the output
FACTORS: tuple[Factor, Factor] = ("a", "b")
# The layout of adapters of experts. "shared-outer": all experts share the factor that touches the model
# width, at full rank. "per-expert": each has both factors, and the rank is divided by the experts of a token.
ExpertLora = Literal["shared-outer", "per-expert"]
EXPERT_LORA: tuple[ExpertLora, ...] = ("shared-outer", "per-expert")
LAYER = "model.layers.{layer}."
EMBED = Source("model.embed_tokens.weight")
FINAL_NORM = Source("model.norm.weight")
LM_HEAD = Source("lm_head.weight")
ROUTER = "router"  # the name of a mixture's router, which no checkpoint encodes
HEAD = "head"  # the name of the vocabulary head among adapted maps


@dataclass(frozen=True)
class Kept:
    """Declares what a layer keeps while a sequence is sampled: for each of its tokens, or once."""

    name: str
    shape: tuple[int, ...]  # without the dimension of tokens or sequences
    split: int | None = None  # the dimension that tp splits
    is_fp32: bool = False


class Attended(NamedTuple):
    """Says what attention multiplies for each pair of a token and one that it sees: widths of all heads."""

    keys: int
    values: int
    window: int = 0  # tokens that a token sees, itself among them; 0: all before it


@runtime_checkable
class Mixer(Protocol):
    """Defines what the declaration of a mixer says."""

    def arrays(self, d_model: int, at: str) -> tuple[Array, ...]:
        """Return the arrays in the order of computation. ``at`` begins their names in a checkpoint."""
        ...

    @property
    def per_token(self) -> tuple[Kept, ...]:
        """What is kept for each token, in pages."""
        ...

    @property
    def per_sequence(self) -> tuple[Kept, ...]:
        """What is kept for each sequence, in slots: a state that every token changes."""
        ...

    @property
    def attended(self) -> Attended | None:
        """What the scores of pairs of tokens cost; None: there are no scores."""
        ...


@runtime_checkable
class Channel(Protocol):
    """Defines what the declaration of a channel says."""

    def arrays(self, d_model: int, at: str) -> tuple[Array, ...]: ...


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

    def arrays(self, d_model: int, at: str) -> tuple[Array, ...]:
        """Return all arrays of the layer, biases among them, in the order of computation."""

        def norm(name: str, module: str) -> Parameter:
            return Parameter(name, (d_model,), Source(f"{at}{module}.weight"))

        declared: list[Array] = [norm("attention_norm", self.mixer_norm), *self.mixer.arrays(d_model, at)]
        if self.channel is not None:
            declared += [norm("mlp_norm", self.channel_norm), *self.channel.arrays(d_model, at)]
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
class Place:
    """Holds one layer of a cycle, and the numbers of the model's layers that are like it."""

    layer: Layer
    numbers: range
    prefix: str  # of the names of its arrays in the model: "" where all layers are alike, else "0.1."

    def name(self, array: str) -> str:
        return self.prefix + array


@dataclass(frozen=True)
class Adapted:
    """Holds a map that adapters have factors for, and the layers that have it."""

    map: Map
    numbers: range | None  # None: it is in no layer

    def lead(self, factor: Factor, layout: ExpertLora) -> tuple[int, ...]:
        """Return the leading dimensions of a factor: (layers, experts), (layers,), or ()."""
        if self.numbers is None:
            return ()
        is_shared = layout == "shared-outer" and factor == self.map.outer_factor
        many = (self.map.experts,) if self.map.experts and not is_shared else ()
        return (len(self.numbers), *many)

    def numbers_per_rank(self, layout: ExpertLora) -> int:
        """Return how many numbers both factors have for a rank of 1."""
        of_a, of_b = (math.prod(self.lead(factor, layout)) for factor in FACTORS)
        return of_a * self.map.width_in + of_b * self.map.width_out


@dataclass(frozen=True)
class Model:
    """Declares a decoder-only transformer."""

    architecture: str  # as config.json names it
    vocab_size: int
    d_model: int
    stack: Stack
    norm: Norm  # the final one
    max_positions: int  # tokens
    embed: Source = EMBED
    final_norm: Source = FINAL_NORM
    head: Source = LM_HEAD  # where it is tied, a checkpoint may have a copy of embed there
    is_tied: bool = False  # whether embed is the head, too
    layer_prefix: str = LAYER
    encoding: Any = None  # one of encoding.py, of the maps of layers whose sources name none
    plain: tuple[str, ...] = ()  # regular expressions: modules of a checkpoint that are not encoded
    ignored: tuple[str, ...] = ()  # regular expressions: tensors of a checkpoint that are not read
    # How the names of layers begin that a checkpoint may have to predict further tokens, which are not read.
    further: tuple[str, ...] = ()
    packs_experts: bool = False  # whether experts that a checkpoint encodes stay encoded on devices
    # One of encoding.py: in which devices keep adapted maps, or in as few bits as a checkpoint encodes them;
    # None: as floating-point numbers.
    base_encoding: Any = None

    @property
    def unread(self) -> Unread:
        """The tensors that a checkpoint may have beside those declared."""
        return Unread(self.ignored, self.further, self.embed.name if self.is_tied else None)

    @cached_property
    def n_layers(self) -> int:
        return sum(cycle.n_layers for cycle in self.stack)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        """The places of all cycles, in order."""
        are_alike = len(self.stack) == 1 and len(self.stack[0].layers) == 1
        found: list[Place] = []
        start = 0
        for number, cycle in enumerate(self.stack):
            end = start + cycle.n_layers
            for position, layer in enumerate(cycle.layers):
                numbers = range(start + position, end, len(cycle.layers))
                found.append(Place(layer, numbers, "" if are_alike else f"{number}.{position}."))
            start = end
        return tuple(found)

    @cached_property
    def adapted(self) -> dict[str, "Adapted"]:
        """The maps that adapters have factors for, by their names in the model; the head is the last one."""
        found = {
            place.name(array.name): Adapted(array, place.numbers)
            for place in self.places
            for array in self.arrays(place)
            if isinstance(array, Map) and array.group is not None
        }
        head = Map(HEAD, self.d_model, self.vocab_size, linear("lm_head"), "columns", "unembed")
        return found | {HEAD: Adapted(head, None)}

    def adapter_numbers(self, layout: ExpertLora) -> dict[Group, int]:
        """Return how many numbers an adapter has for a rank of 1, by the flags that train them."""
        totals: dict[Group, int] = {"attn": 0, "mlp": 0, "unembed": 0}
        for each in self.adapted.values():
            assert each.map.group is not None
            totals[each.map.group] += each.numbers_per_rank(layout)
        return totals

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer, in order."""
        by_number = {number: place.layer for place in self.places for number in place.numbers}
        return tuple(by_number[number] for number in range(self.n_layers))

    @cached_property
    def n_paged(self) -> int:
        """How many layers keep something of each token, in pages."""
        return sum(bool(layer.mixer.per_token) for layer in self.layers)

    @cached_property
    def keeps_values(self) -> bool:
        """Whether pages keep values beside keys. Layers with pages are alike in this."""
        return any(len(layer.mixer.per_token) > 1 for layer in self.layers)

    @cached_property
    def maps(self) -> tuple[Map, ...]:
        """The linear maps of all places."""
        arrays = (array for place in self.places for array in self.arrays(place))
        return tuple(array for array in arrays if isinstance(array, Map))

    def numbers_met(self, tp: int = 1) -> float:
        """Return with how many numbers of the base weights a token is multiplied on its way.

        They are those of linear maps, of the experts that it chooses, and of the head; they are counted on
        one of ``tp`` devices, each of which has its part of the maps that are split, and the others whole.
        """
        layers = sum(len(place.numbers) * met(self.arrays(place), tp) for place in self.places)
        return layers + self.d_model * self.vocab_size / tp

    @cached_property
    def packed(self) -> tuple[Map, ...]:
        """The maps that stay encoded on devices."""
        return tuple(each for each in self.maps if each.kept is not None)

    @cached_property
    def inner_widths(self) -> tuple[int, ...]:
        """The widths of all feed-forward blocks, experts among them, which tp splits."""
        return tuple(
            sorted({each.width_in for each in self.maps if each.group == "mlp" and each.split == "rows"})
        )

    @cached_property
    def outer_widths(self) -> tuple[int, ...]:
        """The widths that fsdp splits if it splits weights: of each map, the one that tp does not."""
        rows = {each.width_out for each in self.maps if each.split == "rows"}
        return tuple(
            sorted({self.d_model, *rows, *(each.width_in for each in self.maps if each.split == "columns")})
        )

    @cached_property
    def stateful(self) -> Mixer | None:
        """The mixer of all layers that keep a state of each sequence; None: there are none."""
        mixers = {layer.mixer for layer in self.layers if layer.mixer.per_sequence}
        assert len(mixers) <= 1, f"{self.architecture} has {len(mixers)} kinds of states"
        return next(iter(mixers), None)

    def kept_numbers(self, place: Place) -> tuple[int, ...]:
        """Return the numbers of a place's layers among those that keep the same: pages, or a state."""
        keeps_state = bool(place.layer.mixer.per_sequence)
        keep = [bool(layer.mixer.per_sequence) == keeps_state for layer in self.layers]
        return tuple(sum(keep[:number]) for number in place.numbers)

    def arrays(self, place: Place) -> tuple[Array, ...]:
        return self._arrays[place.prefix]

    @cached_property
    def _arrays(self) -> dict[str, tuple[Array, ...]]:
        found = {place: place.layer.arrays(self.d_model, self.layer_prefix) for place in self.places}
        return {
            place.prefix: tuple(self._encoded(array, place.numbers[0]) for array in arrays)
            for place, arrays in found.items()
        }

    def _encoded(self, array: Array, number: int) -> Array:
        """Return the array as a checkpoint encodes it; layers that are alike are encoded alike."""
        if not isinstance(array, Map) or array.name == ROUTER:
            return array
        encoding, module = array.source.encoding, array.source.module.format(layer=number, expert=0)
        if encoding is None and not any(re.fullmatch(pattern, module) for pattern in self.plain):
            encoding = self.encoding
        kept = encoding if self.packs_experts and array.experts else None
        base = self.base_encoding
        if kept is None and base is not None and array.group is not None:
            kept = base
            if encoding is not None and encoding.of_byte >= base.of_byte:
                kept = base if array.width_in % encoding.group else encoding
        return replace(array, source=replace(array.source, encoding=encoding), kept=kept)


def met(arrays: Iterable[Array], tp: int) -> float:
    """Return how many numbers of their linear maps a token is multiplied with, as Model.numbers_met does."""
    return sum((array.numbers_met(tp) for array in arrays if isinstance(array, Map)), 0.0)


def in_cycles(layers: tuple[Layer, ...]) -> Stack:
    """Cut a sequence of layers into cycles: from each place on, the one that covers most layers."""
    found: list[Cycle] = []
    start = 0
    while start < len(layers):
        best = Cycle(layers[start : start + 1], 1)
        for length in range(1, (len(layers) - start) // 2 + 1):
            cycle, repeats = layers[start : start + length], 1
            while layers[start + repeats * length : start + (repeats + 1) * length] == cycle:
                repeats += 1
            if repeats > 1 and length * repeats > best.n_layers:
                best = Cycle(cycle, repeats)
        found.append(best)
        start += best.n_layers
    return tuple(found)
