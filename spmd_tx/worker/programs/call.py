"""A program together with the arguments of one call."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_tx.sharding.mesh import DATA
from spmd_tx.sharding.transfer import rows_to_devices


@dataclass(frozen=True)
class Call:
    """Holds a program and its arguments. ``state`` are arrays on the devices, or ShapeDtypeStructs."""

    name: str  # "forward_backward"
    shape: tuple[int, ...]  # identifies the program of this name, in messages
    step: Any  # jitted
    state: tuple[Any, ...]
    rows: tuple[Any, ...] = ()  # host arrays, to be split over ``axes``
    rest: tuple[Any, ...] = ()  # host arrays that every device has whole
    variant: Hashable = None  # what else ``step`` depends on
    axes: tuple[str, ...] = DATA  # of the mesh

    @property
    def key(self) -> Hashable:
        """Identifies the program: everything that may differ between two; the state never does."""
        leaves, structure = jax.tree.flatten((self.rows, self.rest))
        return self.name, self.variant, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)

    def placed(self, mesh: Mesh) -> tuple[Any, ...]:
        """Return the arguments to run with. A process that has all devices leaves host arrays to JAX."""
        rows = self.rows if jax.process_count() == 1 else rows_to_devices(mesh, self.rows, self.axes)
        return (*self.state, *rows, *self.rest)

    def abstract(self, mesh: Mesh) -> tuple[Any, ...]:
        """Return abstract arguments to compile for."""
        split = NamedSharding(mesh, P(self.axes))

        def row(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split)

        return (*self.state, *jax.tree.map(row, self.rows), *self.rest)

    def description(self, mesh: Mesh) -> str:
        """Return a text that tells apart programs whose surroundings are the same, in any process."""
        leaves, structure = jax.tree.flatten(self.abstract(mesh))
        arrays = [f"{leaf.dtype}{leaf.shape} {getattr(leaf, 'sharding', None)}" for leaf in leaves]
        return "\n".join([self.name, repr(self.variant), str(structure), *arrays])

    def __str__(self) -> str:
        return " ".join([self.name, "x".join(map(str, self.shape))]).rstrip()


def int32(value: int) -> np.ndarray:
    """Return a scalar argument of a program."""
    return np.asarray(value, np.int32)
