"""The arrays of the vision tower, from its declaration.

Each device has a part of every matrix, and gathers the whole when it uses it.
Dimension key as in tower.py; L block, K deep merger.
"""

from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from spmd_tx.models.declared.layers import LayerArray
from spmd_tx.models.declared.maps import Parameter
from spmd_tx.models.declared.tower import Tower
from spmd_tx.models.named import Named
from spmd_tx.sharding.mesh import AXES, TP, AnyMesh
from spmd_tx.sharding.tree_node import TreeNode
from spmd_tx.sharding.weight import Weight

Leaf = TypeVar("Leaf")


class TowerWeights(TreeNode, Generic[Leaf]):
    """Holds the tower's arrays; linear maps are [.., in, out]."""

    once: Named[Leaf]
    blocks: Named[Leaf]  # [L, ...]
    deep: Named[Leaf]  # [K, ...]; without deep mergers it is empty


def tower_weights(tower: Tower, dtype: DTypeLike, devices: int = 1) -> TowerWeights[Weight]:
    """Declare the weights, for a mesh of so many devices."""

    def declared(arrays: Iterable[LayerArray], count: int | None) -> Named[Weight]:
        return Named({each.name: _weight(each, count, dtype, devices) for each in arrays})

    deep = declared(tower.deep_merger, len(tower.deep)) if tower.deep else Named[Weight]({})
    return TowerWeights(declared(tower.once, None), declared(tower.block, tower.depth), deep)


class Sight(NamedTuple):
    """Declares what a worker needs to read images."""

    tower: TowerWeights[Weight]
    pool: Weight  # [P, S, D]: tokens of images, which tp splits as it does the vocabulary


def sight(tower: Tower, rows: int, mesh: AnyMesh, dtype: DTypeLike) -> Sight:
    """Declare it, with a pool of so many rows, or a few more that tp can split."""
    tp = mesh.shape[TP]
    shape = (tower.planes, -(-rows // tp) * tp, tower.out)
    return Sight(tower_weights(tower, dtype, mesh.size), Weight(shape, P(None, TP), dtype))


def whole(arrays: Iterable[LayerArray], w: Named[Array]) -> Named[Array]:
    """Return these arrays of one block, or those that are alone, as every device needs them."""
    return Named({each.name: _gathered(w[each.name], _shape(each)) for each in arrays})


def _gathered(part: Array, shape: tuple[int, ...]) -> Array:
    split = next((axis for axis, size in enumerate(part.shape) if size != shape[axis]), None)
    return part if split is None else lax.all_gather(part, AXES, axis=split, tiled=True)


def _shape(array: LayerArray) -> tuple[int, ...]:
    return array.shape if isinstance(array, Parameter) else (array.width_in, array.width_out)


def _weight(array: LayerArray, count: int | None, dtype: DTypeLike, devices: int) -> Weight:
    """Declare one array; ``count``: how many are stacked, None: it is alone."""
    shape, lead = _shape(array), () if count is None else (count,)
    spec, split = P(), next((axis for axis, size in enumerate(shape) if size % devices == 0), None)
    if len(shape) > 1 and devices > 1 and split is not None:
        spec = P(*(None for _ in lead), *(AXES if axis == split else None for axis in range(len(shape))))
    return Weight((*lead, *shape), spec, dtype, array.source.name, array.source.transposed)
