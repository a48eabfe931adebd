"""What all self-tests have in common: programs on one device, how results are compared, and verdicts."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import msgspec
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmd_tx.sharding.mesh import AXES

# The largest allowed error of a number, in units of its own size plus the root mean square of all. The
# reference itself has 0.05 from bfloat16's rounding; a value at a wrong position has about 1.
MOST_ERROR = 0.1
Sizes = TypeVar("Sizes")
WRONG = (NotImplementedError, RuntimeError, TypeError, ValueError)  # of JAX, XLA, Pallas or cuDNN


class Verdict(msgspec.Struct, frozen=True):
    """Holds the result for one implementation."""

    implementation: str
    problem: str | None  # None: it is correct
    platform: str = ""  # of JAX's backend


def tell_verdicts(argument: str, kind: type[Sizes], problem_of: Callable[[str, Sizes], str | None]) -> None:
    """Try one implementation after the other; print each Verdict as a line of JSON as soon as it is known.

    ``argument`` is the JSON of the sizes, which name the implementations.
    """
    sizes: Any = msgspec.json.decode(argument, type=kind)
    for name in sizes.implementations:
        try:
            problem = problem_of(name, sizes)
        except WRONG as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(msgspec.json.encode(Verdict(name, problem, jax.default_backend())).decode(), flush=True)


def worst_error(got: np.ndarray, want: np.ndarray) -> float:
    """Return the largest error, in units of a number's own size plus the root mean square of all."""
    got, want = got.astype(np.float64), want.astype(np.float64)
    return float(np.max(np.abs(got - want) / (np.abs(want) + np.sqrt(np.mean(want**2)))))


def problem_between(what: str, got: np.ndarray, want: np.ndarray, again: np.ndarray) -> str | None:
    """Say what is wrong with a result: that it is off, or that it is another one in a second run."""
    error = worst_error(got, want)
    if not error <= MOST_ERROR:  # also true for NaN
        return f"{what} is off by {error:.2g}"
    return f"{what} differs between two runs" if got.tobytes() != again.tobytes() else None


def mesh_of(device: int) -> Mesh:
    """Return a mesh of one of this process's devices."""
    return Mesh(np.array(jax.local_devices()[device]).reshape(1, 1, 1), AXES)


def on_device(device: int, run: Callable[..., Any], split: P = P()) -> jax.stages.Wrapped:
    """Jit a function as the steps use it: inside shard_map, with all arrays split alike."""
    return jax.jit(jax.shard_map(run, mesh=mesh_of(device), in_specs=split, out_specs=split))
