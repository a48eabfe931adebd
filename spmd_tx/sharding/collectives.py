"""Collectives named by their purpose, for use inside shard_map."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from spmd_tx.sharding.mesh import AXES, DATA, FSDP, TP


def varying(x: Array, *axes: str) -> Array:
    """Mark ``x`` as differing between the devices of ``axes`` (all axes by default), if it is not yet.

    In the backward pass, this is where the gradients of those devices are summed.
    """
    missing = tuple(axis for axis in axes or AXES if axis not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def sum_over_shards(x: Array, among: tuple[str, ...] = AXES) -> Array:
    """Sum over exactly the axes ``among`` these along which ``x`` differs."""
    axes = split_axes(x, among)
    return lax.psum(x, axes) if axes else x


def split_axes(x: Array, among: tuple[str, ...] = AXES) -> tuple[str, ...]:
    """Return the axes along which ``x`` differs, in the same order in all processes."""
    differs = jax.typeof(x).manual_axis_type.varying
    return tuple(axis for axis in AXES if axis in differs and axis in among)


def from_first(x: Array, axis: str) -> Array:
    """Return the first device's numbers on all devices of ``axis``, where they should be the same."""
    if lax.axis_size(axis) == 1:
        return x
    return lax.psum(jnp.where(lax.axis_index(axis) == 0, x, jnp.zeros((), x.dtype)), axis)


def replicate_rows(x: Array) -> Array:
    """Gather the rows of all data shards on every device, in data shard order."""
    for axis in reversed(DATA):
        x = lax.all_gather(x, axis, axis=0, tiled=True, to="invarying")
    return x


def unshard(x: Array, full: int) -> Array:
    """Gather the last dimension over fsdp if it is stored split (ZeRO). The gradient is a sum_scatter."""
    return x if x.shape[-1] == full else gather(x, FSDP, x.ndim - 1)


def gather(x: Array, axis: str, dimension: int) -> Array:
    """Concatenate the parts of the devices of ``axis`` along ``dimension``. The gradient is a sum_scatter.

    Code that is never differentiated may use lax.all_gather.
    """
    if not _is_gloo():
        return lax.all_gather(x, axis, axis=dimension, tiled=True)
    copies = jnp.broadcast_to(x, (lax.axis_size(axis), *x.shape))
    parts = jnp.moveaxis(lax.all_to_all(copies, axis, 0, 0, tiled=True), 0, dimension)
    return parts.reshape(*x.shape[:dimension], -1, *x.shape[dimension + 1 :])


def sum_scatter(x: Array, axis: str, dimension: int) -> Array:
    """Sum over the devices of ``axis``; each keeps its own part of ``dimension``."""
    if not _is_gloo():
        return lax.psum_scatter(x, axis, scatter_dimension=dimension, tiled=True)  # noqa: TID251
    size = lax.axis_size(axis)
    split = (*x.shape[:dimension], size, x.shape[dimension] // size, *x.shape[dimension + 1 :])
    parts = jnp.moveaxis(x.reshape(split), dimension, 0)
    return jnp.sum(lax.all_to_all(parts, axis, 0, 0, tiled=True), axis=0)


def _is_gloo() -> bool:
    """Say whether several processes run on CPUs, so that Gloo does the collectives.

    Then nothing may become a reduce-scatter: its last elements are sometimes wrong, because every rank but
    the first overwrites its send buffer with the result before it is sent
    (github.com/jax-ml/jax/issues/40830). Gloo also gives up on a process that compiles for more than 30
    seconds (40831).
    """
    return jax.process_count() > 1 and jax.default_backend() == "cpu"


def vocabulary_logsumexp(logits_NV: Array) -> Array:
    """Return the log of the sum of exponentials over a vocabulary that is split over tp."""
    peak_N = lax.pmax(lax.stop_gradient(jnp.max(logits_NV, axis=-1)), TP)
    return jnp.log(lax.psum(jnp.sum(jnp.exp(logits_NV - peak_N[..., None]), axis=-1), TP)) + peak_N


def linear(x: Array, kernel: Array, width_out: int, *, stationary: bool) -> Array:
    """Multiply x [B, T, I] by kernel [I, O], whose I or O may be split over fsdp.

    A split kernel is gathered; with ``stationary``, the rows of all devices of fsdp travel to the kernel's
    parts instead, and the results come back: far less traffic when there are few rows.
    """
    splits_in, splits_out = kernel.shape[0] != x.shape[-1], kernel.shape[1] != width_out
    if not (splits_in or splits_out):
        return x @ kernel
    if not stationary:
        return x @ lax.all_gather(kernel, FSDP, axis=0 if splits_in else 1, tiled=True)
    rows = lax.all_gather(x, FSDP, axis=0, tiled=True)
    if splits_out:
        return lax.all_to_all(rows @ kernel, FSDP, split_axis=0, concat_axis=2, tiled=True)
    return contract_slice(rows, "BTI,IO->BTO", kernel).astype(x.dtype)


def gather_inputs(kernel: Array, width_in: int) -> Array:
    """Return a kernel [I, O] with all its inputs, which may be split over fsdp. It has no gradient."""
    return kernel if kernel.shape[0] == width_in else lax.all_gather(kernel, FSDP, axis=0, tiled=True)


def contract_slice(rows: Array, formula: str, kernel: Array) -> Array:
    """Take the rows of all devices of fsdp; return this device's rows of the product, in fp32.

    Each device contracts its kernel's slice of the last dimension.
    """
    width = rows.shape[-1] // lax.axis_size(FSDP)
    own_slice = lax.dynamic_slice_in_dim(rows, lax.axis_index(FSDP) * width, width, axis=rows.ndim - 1)
    partial = jnp.einsum(formula, own_slice, kernel, preferred_element_type=jnp.float32)
    return sum_scatter(partial, FSDP, 0)
