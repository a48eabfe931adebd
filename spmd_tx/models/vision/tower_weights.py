"""The arrays of the vision tower, from its declaration. Every device has all of them.

Dimension key as in tower.py; L block, K deep merger.
"""

from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from flax.struct import PyTreeNode
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from spmd_tx.models.declared.layers import LayerArray
from spmd_tx.models.declared.maps import Parameter
from spmd_tx.models.declared.tower import Tower
from spmd_tx.models.declared.unread import Unread
from spmd_tx.models.named import Named
from spmd_tx.sharding.mesh import TP
from spmd_tx.sharding.weight import Weight

Leaf = TypeVar("Leaf")


class TowerWeights(PyTreeNode, Generic[Leaf]):
    """Holds the tower's arrays; linear maps are [.., in, out]."""

    once: Named[Leaf]
    blocks: Named[Leaf]  # [L, ...]
    deep: Named[Leaf]  # [K, ...]; without deep mergers it is empty


def tower_weights(tower: Tower, dtype: DTypeLike) -> TowerWeights[Weight]:
    """Declare the weights."""

    def declared(arrays: Iterable[LayerArray], count: int | None) -> Named[Weight]:
        return Named({each.name: _weight(each, count, dtype) for each in arrays})

    deep = declared(tower.deep_merger, len(tower.deep)) if tower.deep else Named[Weight]({})
    return TowerWeights(declared(tower.once, None), declared(tower.block, tower.depth), deep)


class Sight(NamedTuple):
    """Declares what a worker needs to read images."""

    tower: TowerWeights[Weight]
    pool: Weight  # [P, S, D]: tokens of images, which tp splits as it does the vocabulary


def sight(tower: Tower, rows: int, tp: int, dtype: DTypeLike) -> Sight:
    """Declare it, with a pool of so many rows, or a few more that tp can split."""
    shape = (tower.planes, -(-rows // tp) * tp, tower.out)
    return Sight(tower_weights(tower, dtype), Weight(shape, P(None, TP), dtype))


def unread(tower: Tower) -> Unread:
    """Return which tensors of a checkpoint are not the tower's."""
    return Unread((tower.unread,))


def _weight(array: LayerArray, count: int | None, dtype: DTypeLike) -> Weight:
    """Declare one array; ``count``: how many are stacked, None: it is alone."""
    shape = array.shape if isinstance(array, Parameter) else (array.width_in, array.width_out)
    lead = () if count is None else (count,)
    return Weight((*lead, *shape), P(), dtype, array.source.name, array.source.transposed)
