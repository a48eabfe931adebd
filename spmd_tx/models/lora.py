"""LoRA adapters (Hu et al. 2021): declaring, initialising and applying many of them at once.

Adapters of all tenants are stacked along a slot axis, ranks below the maximum are padded with zeros,
and untrained groups are all zero. Where A and B are both zero, their gradients are exactly zero, so
neither padding nor untrained groups need a mask.

Every expert of a mixture has its own factors, whose rank is divided by the number of experts per
token ("LoRA Without Regret", Schulman et al. 2025).

Dimension key: L layer, X expert, S slot, R maximum rank, I input width, O output width, B row, T token.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax.struct import PyTreeNode
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from spmd_tx.models.config import ModelConfig
from spmd_tx.models.declared.layers import HEAD
from spmd_tx.models.declared.maps import Group, is_split
from spmd_tx.models.named import Named
from spmd_tx.protocol.commands import expert_rank
from spmd_tx.sharding.mesh import EP, FSDP, TP, AnyMesh
from spmd_tx.sharding.weight import Weight

Leaf = TypeVar("Leaf")

LAYER_GROUPS: tuple[Group, ...] = ("attn", "mlp")


class Lora(PyTreeNode, Generic[Leaf]):
    """Holds the two factors of one linear map: y = x W + scale · (x Aᵀ) B."""

    a: Leaf  # [L, S, R, I]; the head has no L, experts have [L, X, S, R, I]
    b: Leaf  # [L, S, R, O]


class Adapters(PyTreeNode, Generic[Leaf]):
    """Holds the factors of every adapted linear map."""

    layers: dict[str, Lora[Leaf]]
    head: Lora[Leaf]


def names(model: ModelConfig, *groups: Group) -> tuple[str, ...]:
    """Return the names of the adapted maps of some groups, in the order of declaration."""
    return tuple(name for name, each in model.declared.adapted.items() if each.map.group in groups)


def group_of(model: ModelConfig, name: str) -> Group:
    """Return the flag that an adapted map follows."""
    group = model.declared.adapted[name].map.group
    assert group is not None
    return group


def widths(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the input and output width of every adapted linear map."""
    maps = model.declared.adapted
    return {name: (each.map.width_in, each.map.width_out) for name, each in maps.items()}


def local_widths(model: ModelConfig, name: str, tp: int) -> tuple[int, int]:
    """Return the widths of one map on a device of tp."""
    declared = model.declared.adapted[name].map
    parts = tp if is_split(declared, tp) else 1
    of_in, of_out = (parts, 1) if declared.split == "rows" else (1, parts)
    return declared.width_in // of_in, declared.width_out // of_out


def lead(model: ModelConfig, name: str) -> tuple[int, ...]:
    """Return the leading dimensions of a map's factors: (layers,), (layers, experts), or ()."""
    found = model.declared.adapted[name]
    if found.numbers is None:
        return ()
    return (len(found.numbers), found.map.experts) if found.map.experts else (len(found.numbers),)


def rank_of(model: ModelConfig, name: str, rank: int) -> int:
    """Return the rank of one map's factors in an adapter of the given rank."""
    return expert_rank(rank, model.experts_per_token) if len(lead(model, name)) == 2 else rank


def adapter_weights(
    model: ModelConfig, mesh: AnyMesh, slots: int, rank: int, dtype: DTypeLike, *, zero: bool
) -> Adapters[Weight]:
    """Declare ``slots`` adapters; with ``zero`` they are split over fsdp where the widths allow it (ZeRO)."""
    tp, fsdp = mesh.shape[TP], mesh.shape[FSDP]

    def factor(name: str, width: int, split: bool) -> Weight:
        is_even = width % (fsdp * (tp if split else 1)) == 0
        axes = ((TP,) if split else ()) + ((FSDP,) if zero and is_even else ())
        many = lead(model, name)
        spec = P(*(None, EP)[: len(many)], None, None, axes or None)
        return Weight((*many, slots, rank_of(model, name, rank), width), spec, dtype)

    def pair(name: str) -> Lora[Weight]:
        declared = model.declared.adapted[name].map
        splits = is_split(declared, tp)
        return Lora(
            factor(name, declared.width_in, splits and declared.split == "rows"),
            factor(name, declared.width_out, splits and declared.split == "columns"),
        )

    return Adapters({name: pair(name) for name in names(model, *LAYER_GROUPS)}, pair(HEAD))


def init_a(name: str, shape: tuple[int, ...], key: Array) -> Array:
    """Draw A of one slot, ``shape`` [L, R, I] or [R, I], uniform in ±1/√I as peft does (Kaiming, a=√5).

    Every row has its own key, so that an adapter does not depend on the server's maximum rank.
    """
    *lead, width = shape
    keys = jax.random.split(jax.random.fold_in(key, zlib.crc32(name.encode())), 1)
    for size in lead:
        keys = jax.vmap(lambda k, size=size: jax.vmap(lambda i: jax.random.fold_in(k, i))(jnp.arange(size)))(
            keys
        )
        keys = keys.reshape(-1)
    bound = float(1 / np.sqrt(width))
    rows = jax.vmap(lambda k: jax.random.uniform(k, (width,), jnp.float32, -bound, bound))(keys)
    return rows.reshape(shape)


# Takes rows and a map's Lora, or what stands for it (grouped_lora.Place).
ApplyLora = Callable[[Float[Array, "B T I"], Any], Float[Array, "B T O"]]
# Takes the factors of a layer's maps, and returns what ApplyLora takes.
TakeFactors = Callable[[Named[Any]], Named[Any]]


@dataclass(frozen=True)
class ExpertLora:
    """Says which adapters the rows of all devices of ep use in experts."""

    slots_R: Int[Array, " R"]
    scale_S: Float[Array, " S"]
    apply: ApplyLora  # to all rows, where experts run over all of them


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
