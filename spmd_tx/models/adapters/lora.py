"""LoRA adapters (Hu et al. 2021): declaring, initializing and applying many of them at once.

Adapters of all tenants are stacked along a slot axis, ranks below the maximum are padded with zeros,
and untrained groups are all zero. Where A and B are both zero, their gradients are exactly zero, so
neither padding nor untrained groups need a mask.

All experts of a mixture share the factor that touches the model width, or each has both factors, whose rank
is then divided by the number of experts per token ("LoRA Without Regret", Schulman et al. 2025): ExpertLora
in declared/model.py.

Dimension key: L layer, X expert, S slot, R maximum rank, I input width, O output width, B row, T token.
"""

import itertools
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from spmd_tx.models.declared.maps import is_split
from spmd_tx.models.declared.model import FACTORS, HEAD, Model
from spmd_tx.models.named import Named
from spmd_tx.protocol.ranks import expert_rank
from spmd_tx.sharding.mesh import EP, FSDP, TP, AnyMesh
from spmd_tx.sharding.tree_node import TreeNode
from spmd_tx.sharding.weight import Weight

Leaf = TypeVar("Leaf")


class Lora(TreeNode, Generic[Leaf]):
    """Holds the two factors of one linear map: y = x W + scale · (x Aᵀ) B."""

    a: Leaf  # [L, S, R, I]; the head has no L, experts have [L, X, S, R, I] unless they share it
    b: Leaf  # [L, S, R, O]


class Adapters(TreeNode, Generic[Leaf]):
    """Holds the factors of every adapted linear map."""

    layers: dict[str, Lora[Leaf]]
    head: Lora[Leaf]


def for_maps(model: Model, pair: Callable[[str], Lora[Leaf]]) -> Adapters[Leaf]:
    """Return the factors that ``pair`` makes for the name of each adapted map."""
    return Adapters({name: pair(name) for name in model.adapted if name != HEAD}, pair(HEAD))


def local_widths(model: Model, name: str, tp: int) -> tuple[int, int]:
    """Return the widths of one map on a device of tp."""
    declared = model.adapted[name].map
    parts = tp if is_split(declared, tp) else 1
    of_in, of_out = (parts, 1) if declared.split == "rows" else (1, parts)
    return declared.width_in // of_in, declared.width_out // of_out


def has_experts(model: Model, name: str) -> bool:
    """Say whether a map is one of each expert."""
    return model.adapted[name].map.experts > 0


def rank_in_experts(model: Model, rank: int) -> int:
    """Return the rank of the factors of experts in an adapter of the given rank."""
    return expert_rank(rank, model.expert_rank_divisor)


def shapes(model: Model, name: str, rank: int) -> Lora[tuple[int, ...]]:
    """Return the shapes of one map's factors in an adapter of the given rank: [..., R, I] and [..., R, O]."""
    return Lora(*(model.adapted[name].shape(factor, rank) for factor in FACTORS))


def adapter_weights(
    model: Model, mesh: AnyMesh, slots: int, rank: int, dtype: DTypeLike, *, zero: bool
) -> Adapters[Weight]:
    """Declare ``slots`` adapters; with ``zero`` they are split over fsdp where the widths allow it (ZeRO)."""
    tp, fsdp = mesh.shape[TP], mesh.shape[FSDP]

    def factor(shape: tuple[int, ...], split: bool) -> Weight:
        *many, used, width = shape
        is_even = width % (fsdp * (tp if split else 1)) == 0
        axes = ((TP,) if split else ()) + ((FSDP,) if zero and is_even else ())
        spec = P(*(None, EP)[: len(many)], None, None, axes or None)
        return Weight((*many, slots, used, width), spec, dtype)

    def pair(name: str) -> Lora[Weight]:
        declared = model.adapted[name].map
        splits, its = is_split(declared, tp), shapes(model, name, rank)
        return Lora(
            factor(its.a, splits and declared.split == "rows"),
            factor(its.b, splits and declared.split == "columns"),
        )

    return for_maps(model, pair)


def init_a(shapes: Mapping[str, tuple[int, ...]], key: Array) -> dict[str, Array]:
    """Draw A of one slot for each map, [L, R, I] or [R, I], uniform in ±1/√I as peft does (Kaiming, a=√5).

    Every row has its own key, so that an adapter does not depend on the server's maximum rank.
    """
    keys = _row_keys({name: shape[:-1] for name, shape in shapes.items()}, key)

    def draw(name: str, shape: tuple[int, ...]) -> Array:
        width, bound = shape[-1], float(1 / np.sqrt(shape[-1]))
        rows = jax.vmap(lambda k: jax.random.uniform(k, (width,), jnp.float32, -bound, bound))(keys[name])
        return rows.reshape(shape)

    return {name: draw(name, shape) for name, shape in shapes.items()}


def _row_keys(leads: Mapping[str, tuple[int, ...]], key: Array) -> dict[str, Array]:
    """Return a key for each row of each map, of all maps together: each fold takes long to compile."""
    names = sorted(leads, key=lambda name: len(leads[name]))
    fold = jax.vmap(jax.random.fold_in)
    hashes = jnp.array([zlib.crc32(name.encode()) for name in names], jnp.uint32)
    of_maps = jax.vmap(lambda each: jax.random.split(jax.random.fold_in(key, each), 1)[0])(hashes)
    keys = dict[str, Array]()
    for depth, group in itertools.groupby(enumerate(names), lambda each: len(leads[each[1]])):
        places, of_depth = zip(*group, strict=True)
        counts = [math.prod(leads[name]) for name in of_depth]
        rows = jnp.repeat(of_maps[np.array(places)], np.array(counts), total_repeat_length=sum(counts))
        of_rows = [jnp.unravel_index(jnp.arange(math.prod(leads[name])), leads[name]) for name in of_depth]
        for axis in range(depth):
            rows = fold(rows, jnp.concatenate([each[axis] for each in of_rows]))
        keys |= zip(of_depth, jnp.split(rows, np.cumsum(counts)[:-1]), strict=True)
    return keys


# Takes rows and a map's `Lora`, or what stands for it (grouped_lora.Place).
ApplyLora = Callable[[Float[Array, "B T I"], Any], Float[Array, "B T O"]]
# Takes the factors of a layer's maps, and returns what ApplyLora takes.
TakeFactors = Callable[[Named[Any]], Named[Any]]


@dataclass(frozen=True)
class Halves:
    """Applies one factor of a pair alone, to each row that of its own adapter.

    A half of a pair is a pair whose other factor is the unit matrix.
    """

    scaled: ApplyLora
    unscaled: ApplyLora

    def low(self, x_BTI: Array, a_SRI: Array) -> Array:
        """Return scale · x Aᵀ, [B, T, R]."""
        return self.scaled(x_BTI, Lora(a_SRI, _units(a_SRI)))

    def high(self, h_BTR: Array, b_SRO: Array) -> Array:
        """Return h B, [B, T, O]."""
        return self.unscaled(h_BTR, Lora(_units(b_SRO), b_SRO))


def _units(factor: Array) -> Array:
    slots, rank = factor.shape[:2]
    return jnp.broadcast_to(jnp.eye(rank, dtype=factor.dtype), (slots, rank, rank))


@dataclass(frozen=True)
class ExpertAdapters:
    """Says which adapters rows use in experts: this device's, and those of all devices of ep."""

    slots_R: Int[Array, " R"]
    scale_S: Float[Array, " S"]
    apply: ApplyLora  # to all rows, where experts run over all of them
    halves: Halves  # for this device's rows
    all_halves: Halves  # for all rows
    are_joint: bool = False  # whether a product may take all slots' factors, as in bank_lora


def expert_adapters(
    make: Callable[[Array, Array], ApplyLora], slots_B: Array, slots_R: Array, scale_S: Array
) -> ExpertAdapters:
    """Apply adapters in experts as ``make`` applies them to rows."""
    ones = jnp.ones_like(scale_S)
    apply = make(slots_R, scale_S)
    own = Halves(make(slots_B, scale_S), make(slots_B, ones))
    all_rows = Halves(apply, make(slots_R, ones))
    return ExpertAdapters(slots_R, scale_S, apply, own, all_rows, are_joint=make is bank_lora)


def bank_lora(slots_B: Int[Array, " B"], scale_S: Float[Array, " S"]) -> ApplyLora:
    """Apply all adapters to all rows and keep each row's own, reading every adapter once. For one token.

    Adapters are finite, because optim_step and load refuse others, so another row's adapter adds
    exactly zero.
    """
    gate_BS = slots_B[:, None] == jnp.arange(scale_S.shape[0])[None]

    def apply(x_BTI: Array, lora: Lora[Array]) -> Array:
        h_BTSR = jnp.einsum("BTI,SRI->BTSR", x_BTI, lora.a.astype(x_BTI.dtype))
        h_BTSR = h_BTSR * scale_S.astype(x_BTI.dtype)[None, None, :, None]
        h_BTSR = jnp.where(gate_BS[:, None, :, None], h_BTSR, jnp.zeros((), x_BTI.dtype))
        return jnp.einsum("BTSR,SRO->BTO", h_BTSR, lora.b.astype(x_BTI.dtype))

    return apply


def each_lora(slots_B: Int[Array, " B"], scale_S: Float[Array, " S"]) -> ApplyLora:
    """Apply each adapter to all rows by products of its own, and take each row's own. For one token.

    Unlike in bank_lora, neither other adapters nor the adapter's slot can change a bit: there the sum goes
    over all slots, and the place of a slot decides how its part is split.
    """

    def apply(x_BTI: Array, lora: Lora[Array]) -> Array:
        h_SBTR = jnp.einsum("BTI,SRI->SBTR", x_BTI, lora.a.astype(x_BTI.dtype))
        h_SBTR = h_SBTR * scale_S.astype(x_BTI.dtype)[:, None, None, None]
        y_SBTO = jnp.einsum("SBTR,SRO->SBTO", h_SBTR, lora.b.astype(x_BTI.dtype))
        return y_SBTO[slots_B, jnp.arange(slots_B.shape[0])]

    return apply
