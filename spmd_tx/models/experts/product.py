"""The product of grouped rows with the matrices of their experts, by the implementation that is chosen.

Rows come in tiles, and all rows of a tile go to the same expert. A row's result depends on that row and its
expert's matrix alone: no implementation splits a sum in a way that other rows decide.

The matrices of all layers may be given as they are stacked, [L, X, I, O], with the experts of tiles counted
over all layers: then none of them is copied out of the stack first.

Dimension key: P row, M tile, I input width, O output width, X expert, L layer.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from spmd_tx.models.checkpoint.packed import Matrix, decoded
from spmd_tx.models.experts import kernels as pallas
from spmd_tx.protocol.kernels import PRODUCTS, Kernels
from spmd_tx.sharding.collectives import varying

# (rows [P, I], matrices [X, I, O], expert of each tile int32 [M], transposed, experts of all tiles,
# Kernels.interpret) -> [P, O]. Transposed: rows [P, O] -> [P, I].
Product = Callable[[Array, Any, Array, bool, int, bool], Array]


def _reference(
    x_PI: Array, w_XIO: Matrix, expert_M: Array, transposed: bool, experts: int, interpret: bool
) -> Array:
    """Multiply tile after tile, for any platform. On CPUs there is one."""

    def tile(x_JI: Array, expert: Array) -> Array:
        own = jax.tree.map(lambda each: lax.dynamic_index_in_dim(each, expert, 0, keepdims=False), w_XIO)
        w_IO = decoded(own, x_JI.dtype)
        return lax.dot_general(x_JI, w_IO, (((1,), (1 if transposed else 0,)), ((), ())))

    if expert_M.shape[0] == 1:
        return tile(x_PI, expert_M[0])
    tiles = x_PI.reshape(expert_M.shape[0], -1, x_PI.shape[1])
    return lax.map(lambda one: tile(*one), (tiles, expert_M)).reshape(x_PI.shape[0], -1)


IMPLEMENTATIONS: dict[str, Product] = {
    "mosaic": pallas.mosaic,
    "mosaic_gpu": pallas.triton,  # not moved yet
    "triton": pallas.triton,
    "reference": _reference,
}
UNSET: dict[str, Callable[[tuple[int, ...], Array, bool], Array]] = {
    "mosaic": pallas.mosaic_unset,
    **{name: partial(pallas.gpu_unset, name) for name in PRODUCTS["gpu"]},
    "reference": lambda shape, like, _: varying(jnp.zeros(shape, like.dtype)),
}
# The implementations that decode a matrix where they multiply by it.
READS_PACKED = (*PRODUCTS["gpu"], "reference")


def unset(kernels: Kernels, shape: tuple[int, ...], like: Array) -> Array:
    """Return an array for results of which only what was written is read; ``like`` has its type.

    Where products have kernels, setting it to zero would take as long as a product. What XLA allocates
    depends on nothing, and it does so for several layers at once.
    """
    return UNSET[kernels.products](shape, like, kernels.interpret)


@partial(jax.custom_vjp, nondiff_argnums=(0, 4, 5))
def grouped_product(
    kernels: Kernels, x_PI: Array, w_XIO: Matrix, expert_M: Array, transposed: bool = False, experts: int = 0
) -> Array:
    """Multiply each tile of rows by its expert's matrix, or with ``transposed`` by its transpose.

    The matrices are frozen: they get no gradient. All but READS_PACKED decode all of them first. ``experts``
    is how many the tiles usually have, for estimates of what is read; 0: all of a layer.
    """
    if kernels.products not in READS_PACKED:
        w_XIO = decoded(w_XIO, x_PI.dtype)
    stacked = jax.tree.map(lambda each: each.reshape(-1, *each.shape[-2:]), w_XIO)
    run, experts = IMPLEMENTATIONS[kernels.products], experts or w_XIO.shape[-3]
    return run(x_PI, stacked, expert_M, transposed, experts, kernels.interpret)


def _forward(
    kernels: Kernels, x_PI: Array, w_XIO: Matrix, expert_M: Array, transposed: bool, experts: int
) -> tuple[Array, tuple[Matrix, Array]]:
    return grouped_product(kernels, x_PI, w_XIO, expert_M, transposed, experts), (w_XIO, expert_M)


def _backward(
    kernels: Kernels, transposed: bool, experts: int, residuals: tuple[Matrix, Array], slope_PO: Array
) -> tuple[Array, None, None]:
    return grouped_product(kernels, slope_PO, *residuals, not transposed, experts), None, None


grouped_product.defvjp(_forward, _backward)
