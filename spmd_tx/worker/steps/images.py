"""Makes tokens of images: each device encodes one image, and all get the tokens into their part of the pool.

Dimension key: E image (one of each device), N patch, C numbers of a patch, M token of an image, P plane,
S row of the pool, D model width.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmd_tx.models.declared.model import Model
from spmd_tx.models.pallas import in_main_memory
from spmd_tx.models.vision.tower import encode
from spmd_tx.models.vision.tower_weights import TowerWeights
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.mesh import AXES, TP
from spmd_tx.sharding.weight import Weight, specs


def make_encode_images(
    model: Model, mesh: Mesh, tower: TowerWeights[Weight], pool: Weight, kernels: Kernels
) -> Callable[..., Any]:
    """Make (tower, pool, patches, grids, rows) -> pool, which is donated.

    ``patches`` uint8 [E, N, C] and ``grids`` int32 [E, 2] are split over all devices; ``rows`` int32 [E, M]
    says where in the pool each token goes; -1: nowhere.
    """
    assert model.tower is not None
    run = partial(encode, model.tower, kernels=kernels)
    in_specs = (specs(tower), pool.spec, P(AXES), P(AXES), P())

    @partial(jax.jit, donate_argnums=1)
    @partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=pool.spec)
    def encode_images(
        tower: TowerWeights[Array], pool_PSD: Array, patches_ENC: Array, grids_E2: Array, rows_EM: Array
    ) -> Array:
        tokens_PMD = run(tower, patches_ENC[0], grids_E2[0]).astype(pool_PSD.dtype)
        mine, count = lax.axis_index(AXES), pool_PSD.shape[1]

        def hand_round(pool_PSD: Array, image: tuple[Array, Array]) -> tuple[Array, None]:
            number, rows_M = image
            # All but one device add zeros, so that the sum is exact.
            its_PMD = lax.psum(jnp.where(mine == number, tokens_PMD, jnp.zeros((), tokens_PMD.dtype)), AXES)
            local_M = rows_M - lax.axis_index(TP) * count
            is_here_M = (rows_M >= 0) & (local_M >= 0) & (local_M < count)
            behind_M = count + jnp.arange(len(rows_M), dtype=rows_M.dtype)  # dropped, and each another one
            places_M = jnp.where(is_here_M, local_M, behind_M)
            pool_PSD = pool_PSD.at[:, places_M].set(its_PMD, mode="drop", unique_indices=True)
            if kernels.images == "mosaic":
                pool_PSD = in_main_memory(pool_PSD, interpret=kernels.interpret)
            return pool_PSD, None

        return lax.scan(hand_round, pool_PSD, (jnp.arange(mesh.size), rows_EM))[0]

    return encode_images
