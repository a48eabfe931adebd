"""The model: its stack of layers, what surrounds them, and what devices keep of it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from spmd_tx.models.declared.channels import Glu, Mixture
from spmd_tx.models.declared.delta_rule import DeltaRule
from spmd_tx.models.declared.latent import Latent
from spmd_tx.models.declared.layers import Layer, LayerArray, Mixer, Norm, Stack, StackPlace
from spmd_tx.models.declared.maps import AdapterGroup, Map, TensorSource, linear
from spmd_tx.models.declared.mixers import Softmax
from spmd_tx.models.declared.mtp import JOINS, MtpLayer
from spmd_tx.models.declared.tower import Tower
from spmd_tx.models.declared.unread import Unread
from spmd_tx.protocol.ranks import expert_rank

Factor = Literal["a", "b"]  # of an adapter: the one that takes the input, and the one that gives the output
FACTORS: tuple[Factor, Factor] = ("a", "b")
# The layout of adapters of experts. "shared-outer": all experts share the factor that touches the model
# width, at full rank. "per-expert": each has both factors, and the rank is divided by the experts of a token.
ExpertLora = Literal["shared-outer", "per-expert"]
EXPERT_LORA: tuple[ExpertLora, ...] = ("shared-outer", "per-expert")
LAYER = "model.layers.{layer}."
EMBED = TensorSource("model.embed_tokens.weight")
FINAL_NORM = TensorSource("model.norm.weight")
LM_HEAD = TensorSource("lm_head.weight")
ROUTER = "router"  # the name of a mixture's router, which no checkpoint encodes; nor does one JOINS
HEAD = "head"  # the name of the vocabulary head among adapted maps


@dataclass(frozen=True)
class Adapted:
    """Holds a map that adapters have factors for, and the layers that have it."""

    map: Map
    numbers: range | None  # None: it is in no layer
    layout: ExpertLora
    rank_divisor: int  # of the rank, where each expert has the map

    @property
    def group(self) -> AdapterGroup:
        """The flag that its adapters follow."""
        assert self.map.group is not None
        return self.map.group

    def rank(self, rank: int) -> int:
        """Return the rank of its factors in an adapter of the given rank."""
        return expert_rank(rank, self.rank_divisor) if self.map.experts else rank

    def shape(self, factor: Factor, rank: int) -> tuple[int, ...]:
        """Return the shape of a factor in an adapter of the given rank: [..., R, I] or [..., R, O]."""
        width = self.map.width_in if factor == "a" else self.map.width_out
        return (*self.lead(factor), self.rank(rank), width)

    def lead(self, factor: Factor) -> tuple[int, ...]:
        """Return the leading dimensions of a factor: (layers, experts), (layers,), or ()."""
        if self.numbers is None:
            return ()
        is_shared = self.layout == "shared-outer" and factor == self.map.outer_factor
        many = (self.map.experts,) if self.map.experts and not is_shared else ()
        return (len(self.numbers), *many)


@dataclass(frozen=True)
class Model:
    """Declares a decoder-only transformer."""

    architecture: str  # as config.json names it
    vocab_size: int
    d_model: int
    stack: Stack
    norm: Norm  # the final one
    max_positions: int  # tokens
    embed: TensorSource = EMBED
    final_norm: TensorSource = FINAL_NORM
    head: TensorSource = LM_HEAD  # where it is tied, a checkpoint may have a copy of embed there
    is_tied: bool = False  # whether embed is the head, too
    layer_prefix: str = LAYER
    encoding: Any = None  # one of encoding.py, of the maps of layers whose sources name none
    plain: tuple[str, ...] = ()  # regular expressions: modules of a checkpoint that are not encoded
    ignored: tuple[str, ...] = ()  # regular expressions: tensors of a checkpoint that are not read
    # How the names of layers begin that a checkpoint may have for further tokens; only ``mtp`` is read.
    further: tuple[str, ...] = ()
    mtp: MtpLayer | None = None  # what makes drafts of its own; None: the model has none, or leaves it out
    packs_experts: bool = False  # whether experts that a checkpoint encodes stay encoded on devices
    # One of encoding.py: in which devices keep adapted maps, or in as few bits as a checkpoint encodes them;
    # None: as floating-point numbers.
    base_encoding: Any = None
    expert_lora: ExpertLora = "shared-outer"  # the layout of adapters of experts
    tower: Tower | None = None  # what makes tokens of images; None: the model reads text only

    @cached_property
    def attention(self) -> Softmax | Latent:
        """The mixer of the first layer with attention, whose sizes are the model's."""
        return next(layer.mixer for layer in self.layers if isinstance(layer.mixer, Softmax | Latent))

    @cached_property
    def mixture(self) -> Mixture | None:
        """The channel of the first layer with experts; None: there are none."""
        return next((layer.channel for layer in self.layers if isinstance(layer.channel, Mixture)), None)

    @property
    def n_heads(self) -> int:
        return self.attention.heads

    @property
    def n_kv_heads(self) -> int:
        return self.attention.kv_heads

    @property
    def head_dim(self) -> int:
        """How many numbers a page keeps of a token for each of its heads."""
        return self.attention.width

    @cached_property
    def d_ff(self) -> int:
        """The inner width of one expert if there are any, or else of the widest feed-forward block."""
        if self.mixture is not None:
            return self.mixture.width
        return max(layer.channel.width for layer in self.layers if isinstance(layer.channel, Glu))

    @property
    def n_experts(self) -> int:
        """The experts of a layer that has any; 0: there are none."""
        return 0 if self.mixture is None else self.mixture.experts

    @property
    def experts_per_token(self) -> int:
        return 0 if self.mixture is None else self.mixture.chosen

    @property
    def expert_rank_divisor(self) -> int:
        """By how much the rank of factors of experts is less than the adapter's."""
        return max(1, self.experts_per_token) if self.expert_lora == "per-expert" else 1

    @property
    def linear_heads(self) -> int:
        """The heads of keys of the layers with linear attention, which tp splits; 0: there are none."""
        return self.stateful.k_heads if isinstance(self.stateful, DeltaRule) else 0

    @property
    def window(self) -> int:
        """The tokens that a token sees in layers with a window, itself among them; 0: there are none."""
        return self.stateful.window if isinstance(self.stateful, Softmax) else 0

    @property
    def unread(self) -> Unread:
        """The tensors that a checkpoint may have beside those declared."""
        ignored = self.ignored + (() if self.mtp is None else self.mtp.copies)
        return Unread(ignored, self.further, self.embed.name if self.is_tied else None)

    @cached_property
    def n_layers(self) -> int:
        return sum(cycle.n_layers for cycle in self.stack)

    @cached_property
    def places(self) -> tuple[StackPlace, ...]:
        """The places of all cycles, in order."""
        are_alike = len(self.stack) == 1 and len(self.stack[0].layers) == 1
        places: list[StackPlace] = []
        start = 0
        for number, cycle in enumerate(self.stack):
            end = start + cycle.n_layers
            for position, layer in enumerate(cycle.layers):
                numbers = range(start + position, end, len(cycle.layers))
                places.append(StackPlace(layer, numbers, "" if are_alike else f"{number}.{position}."))
            start = end
        return tuple(places)

    @cached_property
    def adapted(self) -> dict[str, Adapted]:
        """The maps that adapters have factors for, by their names in the model; the head is the last one."""
        how = self.expert_lora, self.expert_rank_divisor
        adapted = {
            place.name(array.name): Adapted(array, place.numbers, *how)
            for place in self.places
            for array in self.arrays(place)
            if isinstance(array, Map) and array.group is not None
        }
        head = Map(HEAD, self.d_model, self.vocab_size, linear("lm_head"), "columns", "unembed")
        return adapted | {HEAD: Adapted(head, None, *how)}

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer, in order."""
        by_number = {number: place.layer for place in self.places for number in place.numbers}
        return tuple(by_number[number] for number in range(self.n_layers))

    @cached_property
    def n_paged(self) -> int:
        """How many layers keep something of each token, in pages."""
        return sum(layer.mixer.pools > 0 for layer in self.layers)

    @property
    def n_pools(self) -> int:
        """How many layers have pages: those of the stack, and behind them the one of drafts."""
        return self.n_paged + (self.mtp is not None)

    @cached_property
    def keeps_values(self) -> bool:
        """Whether pages keep values beside keys. Layers with pages are alike in this."""
        return any(layer.mixer.pools > 1 for layer in self.layers)

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
        mixers = {layer.mixer for layer in self.layers if not layer.mixer.pools}
        assert len(mixers) <= 1, f"{self.architecture} has {len(mixers)} kinds of states"
        return next(iter(mixers), None)

    def kept_numbers(self, place: StackPlace) -> tuple[int, ...]:
        """Return the numbers of a place's layers among those that keep the same: pages, or a state."""
        keep = [bool(layer.mixer.pools) == bool(place.layer.mixer.pools) for layer in self.layers]
        return tuple(sum(keep[:number]) for number in place.numbers)

    @cached_property
    def mtp_arrays(self) -> tuple[LayerArray, ...]:
        """The arrays of the layer that makes drafts; (): there is none."""
        if self.mtp is None:
            return ()
        return tuple(self._encoded(array, 0) for array in self.mtp.arrays(self.d_model, ""))

    def arrays(self, place: StackPlace) -> tuple[LayerArray, ...]:
        return self._arrays[place.prefix]

    @cached_property
    def _arrays(self) -> dict[str, tuple[LayerArray, ...]]:
        by_place = {place: place.layer.arrays(self.d_model, self.layer_prefix) for place in self.places}
        return {
            place.prefix: tuple(self._encoded(array, place.numbers[0]) for array in arrays)
            for place, arrays in by_place.items()
        }

    def _encoded(self, array: LayerArray, number: int) -> LayerArray:
        """Return the array as a checkpoint encodes it; layers that are alike are encoded alike."""
        if not isinstance(array, Map) or array.name in (ROUTER, JOINS):
            return array
        encoding, module = array.source.encoding, array.source.module.format(layer=number, expert=0)
        if encoding is None and not any(re.fullmatch(pattern, module) for pattern in self.plain):
            encoding = self.encoding
        target = encoding if self.packs_experts and array.experts else None
        base = self.base_encoding
        if target is None and base is not None and array.group is not None:
            target = base
            if encoding is not None and encoding.of_byte >= base.of_byte:
                target = base if array.width_in % encoding.group else encoding
        return replace(array, source=replace(array.source, encoding=encoding), kept=target)


def met(arrays: Iterable[LayerArray], tp: int) -> float:
    """Return how many numbers of their linear maps a token is multiplied with, as Model.numbers_met does."""
    return sum((array.numbers_met(tp) for array in arrays if isinstance(array, Map)), 0.0)
