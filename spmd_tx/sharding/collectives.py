"""Collectives with a meaning of their own, for the inside of shard_map."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from spmd_tx.sharding.mesh import AXES, DATA, FSDP, TP


def varying(x: Array, *axes: str) -> Array:
    """Mark ``x`` as differing between the devices of ``axes`` (all axes by default), if it is not yet.

    Under differentiation this is where the gradients of those devices are added up.
    """
    missing = tuple(axis for axis in axes or AXES if axis not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def sum_over_shards(x: Array) -> Array:
    """Add up over exactly the axes along which ``x`` differs."""
    differs = jax.typeof(x).manual_axis_type.varying
    axes = tuple(axis for axis in AXES if axis in differs)  # a set's own order differs between processes
    return lax.psum(x, axes) if axes else x


def replicate_rows(x: Array) -> Array:
    """Rows of one data shard -> rows of all, on every device, in data shard order."""
    for axis in reversed(DATA):
        x = lax.all_gather(x, axis, axis=0, tiled=True, to="invarying")
    return x


def unshard(x: Array, full: int) -> Array:
    """Gather the last dimension over fsdp if it is stored split (ZeRO). Its gradient is a reduce-scatter."""
    return x if x.shape[-1] == full else lax.all_gather(x, FSDP, axis=x.ndim - 1, tiled=True)


def vocabulary_logsumexp(logits_NV: Array) -> Array:
    """Log of the sum of exponentials over a vocabulary that is split over tp."""
    peak_N = lax.pmax(lax.stop_gradient(jnp.max(logits_NV, axis=-1)), TP)
    return jnp.log(lax.psum(jnp.sum(jnp.exp(logits_NV - peak_N[..., None]), axis=-1), TP)) + peak_N
