"""Host arrays to global arrays."""

from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_tx.sharding.mesh import DATA


def rows_to_devices(mesh: Mesh, tree: Any, axes: tuple[str, ...] = DATA) -> Any:
    """Split the first dimension of every array over the axes. Every process holds the whole tree."""
    sharding = NamedSharding(mesh, P(axes))
    if jax.process_count() == 1:
        return jax.device_put(tree, sharding)
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, lambda index: x[index]), tree
    )


def to_devices(array: np.ndarray, sharding: NamedSharding) -> Array:
    """Place an array of which every process holds the whole."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
