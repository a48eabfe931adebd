"""Compares a product of grouped rows with the matrices of their experts with the reference, on the device.

Besides being right, a kernel must give a row the same bits whatever else stands in its tile and wherever the
tile stands, and the same bits twice.

    python -m spmd_tx.worker.expert_self_test '{"experts": 16, "width": 2048, "inner": 768}'

prints a Verdict as a line of JSON. A broken kernel may end the process, which accelerator.py starts.
"""

import sys

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmd_tx.models.experts.product import grouped_product, implementation
from spmd_tx.sharding.mesh import AXES
from spmd_tx.worker.self_test import MOST_ERROR, Verdict, worst_error

TILE, TILES = 128, 12  # as training has them


class ExpertSizes(msgspec.Struct, frozen=True):
    """Holds the sizes of the experts on one device."""

    experts: int
    width: int  # of the model
    inner: int
    dtype: str = "bfloat16"
    device: int = 0  # among those of this process


def problem_of_product(name: str, sizes: ExpertSizes) -> str | None:
    """Say why an implementation must not be used; None if it is right and no other row changes a bit."""
    random = np.random.default_rng(0)
    expert_M = random.integers(0, sizes.experts, TILES).astype(np.int32)
    w_XIO = _random(random, sizes.dtype, sizes.experts, sizes.width, sizes.inner)
    for transposed, width in ((False, sizes.width), (True, sizes.inner)):
        which = "transposed product" if transposed else "product"
        x_PI = _random(random, sizes.dtype, TILE * TILES, width)
        run = _jitted(name, transposed, sizes.device)
        got, again = (np.asarray(run(x_PI, w_XIO, expert_M)) for _ in range(2))
        error = worst_error(got, _expected(x_PI, w_XIO, expert_M, transposed))
        if not error <= MOST_ERROR:  # also true for NaN
            return f"the {which} is off by {error:.2g}"
        if got.tobytes() != again.tobytes():
            return f"the {which} differs between two runs"
        tiles, rows = random.permutation(TILES), random.permutation(TILE)
        moved = np.asarray(x_PI).reshape(TILES, TILE, -1)[tiles][:, rows]
        moved[:, TILE // 2 :] = np.asarray(_random(random, sizes.dtype, TILES, TILE - TILE // 2, width))
        other = run(jnp.asarray(moved.reshape(x_PI.shape)), w_XIO, expert_M[tiles])
        kept = np.asarray(other).reshape(TILES, TILE, -1)[:, : TILE // 2]
        if kept.tobytes() != got.reshape(TILES, TILE, -1)[tiles][:, rows][:, : TILE // 2].tobytes():
            return f"the {which} of a row depends on its place, or on other rows"
    return None


def _jitted(name: str, transposed: bool, device: int) -> jax.stages.Wrapped:
    """Return the product as the steps use it: inside shard_map, on one device."""
    mesh = Mesh(np.array(jax.local_devices()[device]).reshape(1, 1, 1), AXES)

    def run(x_PI: Array, w_XIO: Array, expert_M: Array) -> Array:
        return grouped_product(name, x_PI, w_XIO, expert_M, transposed)

    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(P(), P(), P()), out_specs=P()))


def _expected(x_PI: Array, w_XIO: Array, expert_M: np.ndarray, transposed: bool) -> np.ndarray:
    tiles = np.asarray(x_PI, np.float32).reshape(len(expert_M), TILE, -1)
    matrices = np.asarray(w_XIO, np.float32)
    each = (
        tile @ (matrices[expert].T if transposed else matrices[expert])
        for tile, expert in zip(tiles, expert_M, strict=True)
    )
    return np.concatenate(list(each))


def _random(random: np.random.Generator, dtype: str, *shape: int) -> Array:
    return jnp.asarray(random.standard_normal(shape, np.float32), jnp.dtype(dtype))


def main(argument: str) -> None:
    """Try the kernel of this process's platform."""
    sizes = msgspec.json.decode(argument.encode(), type=ExpertSizes)
    name = implementation(jax.default_backend())
    try:
        problem = problem_of_product(name, sizes)
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:  # of JAX, XLA or Pallas
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    print(msgspec.json.encode(Verdict(name, problem, jax.default_backend())).decode(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
