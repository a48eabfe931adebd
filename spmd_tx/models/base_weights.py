"""The arrays of the frozen base model, from its declaration: shapes, sharding, and places in checkpoints.

Dimension key as in backbone.py.
"""

from dataclasses import replace
from typing import Any, Generic, TypeVar

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from spmd_tx.models.checkpoint.packed import Packed, scale_dtype
from spmd_tx.models.declared.maps import Map, Parameter, TensorSource, is_split
from spmd_tx.models.declared.model import Model
from spmd_tx.models.named import Named
from spmd_tx.sharding.mesh import EP, FSDP, TP, AnyMesh
from spmd_tx.sharding.tree_node import TreeNode
from spmd_tx.sharding.weight import Weight

Leaf = TypeVar("Leaf")


class Weights(TreeNode, Generic[Leaf]):
    """Holds the frozen base model."""

    embed: Leaf  # [V, D]
    # Every array of a layer, stacked over the layers that are alike: [L, ...], for experts [L, X, ...].
    # Linear maps are [L, I, O]; experts that stay encoded are Packed (packed.py).
    layers: Named[Leaf]
    final_norm: Leaf  # [D]
    head: Leaf | None  # [V, D]; None: tied to embed
    # [P, S, D]: tokens of images, which extend the vocabulary: those for embed, and those that first layers
    # add. None: there are none.
    images: Leaf | None = None
    # The layer that makes drafts (mtp.py), which is not stacked. JAX puts values of its own in place of None.
    mtp: Named[Leaf] | Leaf | None = None

    @property
    def trained(self) -> "Weights[Leaf]":
        """The model alone, which may be trained as a whole."""
        return self.replace(images=None, mtp=None)

    @property
    def unembed(self) -> Leaf:
        """[V, D]"""
        return self.embed if self.head is None else self.head


def weights(
    model: Model, mesh: AnyMesh, dtype: DTypeLike, *, split_over_fsdp: bool = False
) -> Weights[Weight]:
    """Declare the weights. With fewer heads than tp, every device keeps all of them."""
    fsdp = FSDP if split_over_fsdp else None
    vocabulary = P(TP, fsdp)
    layers: dict[str, Any] = {}
    for place in model.places:
        for array in model.arrays(place):
            layers[place.name(array.name)] = _of_layers(array, place.numbers, mesh, fsdp, dtype)
    mtp: dict[str, Any] = {
        array.name: _of_layers(array, None, mesh, fsdp, dtype) for array in model.mtp_arrays
    }
    table = (model.vocab_size, model.d_model)
    return Weights(
        embed=_weight(table, vocabulary, dtype, model.embed),
        layers=Named(layers),
        final_norm=_weight((model.d_model,), P(), dtype, model.final_norm),
        head=None if model.is_tied else _weight(table, vocabulary, dtype, model.head),
        mtp=Named(mtp) if mtp else None,
    )


Axes = tuple[str | None, ...]


def _linear(declared: Map, mesh: AnyMesh, fsdp: str | None) -> tuple[tuple[int, ...], Axes]:
    """Return the shape and sharding in one layer. Of the two widths, fsdp splits the one that tp does not."""
    tp = TP if is_split(declared, mesh.shape[TP]) else None
    widths: Axes = (None, None)
    if declared.split == "columns":
        widths = (fsdp, tp)
    elif declared.split == "rows":
        widths = (tp, fsdp)
    many = (declared.experts,) if declared.experts else ()
    return (*many, declared.width_in, declared.width_out), (*(EP for _ in many), *widths)


def _parameter(declared: Parameter, mesh: AnyMesh) -> tuple[tuple[int, ...], Axes]:
    axes: list[str | None] = [None] * len(declared.shape)
    if declared.experts_first:
        axes[0] = EP
    if declared.split is not None and is_split(declared, mesh.shape[TP]):
        axes[declared.split] = TP
    return declared.shape, tuple(axes)


def _of_layers(
    array: Map | Parameter, numbers: range | None, mesh: AnyMesh, fsdp: str | None, dtype: DTypeLike
) -> Weight | Packed:
    """Declare an array of the layers with these numbers, stacked; None: of one layer, as it is."""
    shape, axes = _linear(array, mesh, fsdp) if isinstance(array, Map) else _parameter(array, mesh)
    if numbers is not None:
        shape, axes = (len(numbers), *shape), (None, *axes)
    if isinstance(array, Map) and array.kept is not None:
        return _packed(array, numbers, shape, axes)
    if isinstance(array, Parameter) and array.is_fp32:
        dtype = jnp.float32
    return _weight(shape, P(*axes) if any(axes) else P(), dtype, array.source, numbers)


def _packed(array: Map, numbers: range | None, whole: tuple[int, ...], axes: Axes) -> Packed:
    """Declare the two arrays of encoded matrices, which are split as the decoded ones would be."""
    *lead, width_in, width_out = whole
    encoding, source = array.kept, array.source

    def piece(name: str, inputs: int, dtype: DTypeLike) -> Weight:
        shape = (*lead, width_in // inputs, width_out)
        weight = _weight(shape, P(*axes), dtype, source, numbers)
        return replace(weight, piece=name, kept=encoding)

    of_bytes = piece("numbers", encoding.of_byte, jnp.uint8)
    return Packed(of_bytes, piece("scales", encoding.group, scale_dtype(encoding)), encoding)


def _weight(
    shape: tuple[int, ...], spec: P, dtype: DTypeLike, source: TensorSource, numbers: range | None = None
) -> Weight:
    return Weight(
        shape,
        spec,
        dtype,
        source.name,
        source.transposed,
        numbers,
        source.rows,
        source.encoding,
    )
