"""Compares an attention among patches with the reference, on the device, in a separate process.

    python -m spmd_tx.worker.self_tests.images '{"heads": 16, "width": 72, ...}'

prints a Verdict per implementation, as a line of JSON, as soon as it is known.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import Array

from spmd_tx.models.pallas import in_main_memory
from spmd_tx.models.vision.attention import attend
from spmd_tx.protocol.kernels import PALLAS, Kernels
from spmd_tx.worker.self_tests.verdict import on_device, problem_between, tell_verdicts

# Of padded images: how many patches are there.
COUNTS = {256: (4, 252, 256), 1024: (516, 1024), 4096: (2200,)}

AttendPatches = Callable[
    [Array, Array, Array, Array], Array
]  # queries, keys, values [N, H, E], and the count


class ImageSizes(msgspec.Struct, frozen=True):
    """Holds the sizes of a tower's attention."""

    what: ClassVar[str] = "attention of images"  # is tried, in messages
    implementations: list[str]
    heads: int
    width: int  # of a head
    device: int = 0  # among those of this process


def problem_of(
    attend: AttendPatches, sizes: ImageSizes, counts: dict[int, tuple[int, ...]] = COUNTS
) -> str | None:
    """Say why an implementation must not be used; None if it is correct.

    It must be close to the reference, give the same bits twice, and the same whatever stands behind the
    image's end.
    """
    for patches, several in counts.items():
        random = np.random.default_rng(patches)
        shape = (3, patches, sizes.heads, sizes.width)
        arrays = random.standard_normal(shape, np.float32), random.standard_normal(shape, np.float32)
        first, others = (jnp.asarray(each, jnp.bfloat16) for each in arrays)
        for count in several:
            beyond = jnp.where(jnp.arange(patches)[:, None, None] < count, first, 4 * others)
            found = [
                np.asarray(attend(each[0], each[1], each[2], jnp.int32(count)))[:count]
                for each in (first, first, beyond)
            ]
            with jax.default_matmul_precision("highest"):
                run = implementation(Kernels(), sizes.device)
                q, k, v = first.astype(jnp.float32)
                exact = np.asarray(run(q, k, v, jnp.int32(count)))[:count]
            what = f"attention among {count} of {patches} patches"
            if problem := problem_between(what, found[0], exact, found[1]):
                return problem
            if found[0].tobytes() != found[2].tobytes():
                return f"{what} depends on what is behind the image's end"
    return None


def implementation(kernels: Kernels, device: int) -> AttendPatches:
    """Return attention as the tower uses it: inside shard_map, on one device."""
    return on_device(device, lambda *arrays: attend(kernels, *arrays))


def _problem_of(name: str, sizes: ImageSizes) -> str | None:
    kernels = Kernels(images=name)
    if name == PALLAS["tpu"]:  # a kernel of that language also says where the pool of images' tokens lies
        pool = jnp.zeros((1, 8, 128), jnp.bfloat16)
        on_device(sizes.device, partial(in_main_memory, interpret=kernels.interpret))(
            pool
        ).block_until_ready()
    return problem_of(implementation(kernels, sizes.device), sizes)


if __name__ == "__main__":
    tell_verdicts(sys.argv[1], ImageSizes, _problem_of)
