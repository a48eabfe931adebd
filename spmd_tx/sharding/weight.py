"""One declaration per weight: its shape, its sharding, and its name in Hugging Face checkpoints."""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclass(frozen=True)
class Weight:
    """Declares one array; a leaf of parameter trees before the arrays exist."""

    shape: tuple[int, ...]
    spec: PartitionSpec
    dtype: Any
    hf_name: str = ""  # "{layer}" and "{expert}" stand for the indices along the first dimensions, in order
    transposed: bool = False  # Hugging Face stores [out, in], we compute with [in, out]
    numbers: range | None = None  # that "{layer}" stands for; None: 0, 1, ...
    rows: tuple[int, int, int] | None = None  # of the stored tensor: first, end, step; None: all
    encoding: Any = None  # how its numbers are stored; None: as floating-point numbers
    # Of matrices that stay encoded [..., I, O]: "numbers" [..., I / n, O] or "scales" [..., I / J, O].
    piece: str = ""
    kept: Any = None  # how these are encoded; where they are not stored so, it is done while they are loaded


def specs(weights: Any) -> Any:
    """Return the tree of PartitionSpecs of a tree of Weights."""
    return jax.tree.map(lambda weight: weight.spec, weights)


def shardings(mesh: Mesh, weights: Any) -> Any:
    """Return the tree of NamedShardings of a tree of Weights."""
    return jax.tree.map(lambda weight: NamedSharding(mesh, weight.spec), weights)


def abstract(mesh: Mesh, weights: Any) -> Any:
    """Return the tree of ShapeDtypeStructs, with shardings, of a tree of Weights."""

    def leaf(weight: Weight) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(weight.shape, weight.dtype, sharding=NamedSharding(mesh, weight.spec))

    return jax.tree.map(leaf, weights)
