"""LoRA for rows of many tokens: each has its own adapter, at a cost independent of the number of slots.

Training stores factors split over fsdp (ZeRO). A layer gathers them when it runs, in the compute dtype: those
of this device's rows, or of all slots where there are more rows than slots.

Dimension key as in lora.py; W width of a factor, F devices of fsdp, D rows of all of them.
"""

from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from spmd_tx.models.adapters.lora import ApplyLora, Lora, TakeFactors
from spmd_tx.models.adapters.row_sums import row_sums
from spmd_tx.models.named import Named
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.collectives import gather, sum_scatter, unshard
from spmd_tx.sharding.mesh import FSDP
from spmd_tx.sharding.tree_node import static


class StoredLora(Lora[Any]):
    """Holds what this device stores of two factors, whose last dimension may be split over fsdp."""

    width_in: int = static(default=0)  # of the gathered factors
    width_out: int = static(default=0)


class RowsLora(Lora[Any]):
    """Holds each row's own factors, [B, R, I] and [B, R, O]."""


def whole(lora: Lora[Any]) -> Lora[Any]:
    """Gather factors, of all slots; None stays None. In the backward pass, devices' gradients are summed."""
    if not isinstance(lora, StoredLora):
        return lora
    a = None if lora.a is None else unshard(lora.a, lora.width_in)
    return Lora(a, None if lora.b is None else unshard(lora.b, lora.width_out))


@dataclass(frozen=True)
class _Stack:
    """Describes a factor of all slots, and how rows get theirs."""

    slots: int
    width: int  # when gathered
    dtype: Any  # of the rows' factors
    kernels: Kernels


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows_of(how: _Stack, stack_SRW: Array, slots_B: Array) -> Array:
    """Return each row's factor. In the backward pass, row after row is added in fp32 (row_sums.py)."""
    if stack_SRW.shape[-1] == how.width:
        return stack_SRW[slots_B].astype(how.dtype)
    return gather(stack_SRW.astype(how.dtype), FSDP, 2)[slots_B]


def _forward(how: _Stack, stack_SRW: Array, slots_B: Array) -> tuple[Array, tuple[Array, Array]]:
    return _rows_of(how, stack_SRW, slots_B), (slots_B, stack_SRW[:0])


def _backward(how: _Stack, residuals: tuple[Array, Array], grad_BRW: Array) -> tuple[Array, None]:
    slots_B, nothing = residuals
    sum_SRW = row_sums(how.kernels, grad_BRW, slots_B, how.slots)
    sum_SRW = sum_SRW if nothing.shape[-1] == how.width else sum_scatter(sum_SRW, FSDP, 2)
    return sum_SRW.astype(nothing.dtype), None


_rows_of.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _exchanged(how: _Stack, stack_SRW: Array, slots_B: Array, slots_D: Array) -> Array:
    """Return each row's factor [F, B, R, W / F] of one that is split over the F devices of fsdp.

    Devices send each other the factors of their rows only. In the backward pass they send the rows'
    gradients back, and each adds those of all devices' rows.
    """
    parts_DRW = stack_SRW[slots_D].astype(how.dtype)
    parts_DRW = lax.all_to_all(parts_DRW, FSDP, split_axis=0, concat_axis=0, tiled=True)
    return parts_DRW.reshape(-1, slots_B.shape[0], *parts_DRW.shape[1:])


def _exchange(
    how: _Stack, stack_SRW: Array, slots_B: Array, slots_D: Array
) -> tuple[Array, tuple[Array, Array]]:
    return _exchanged(how, stack_SRW, slots_B, slots_D), (slots_D, stack_SRW[:0])


def _exchange_back(how: _Stack, residuals: tuple[Array, Array], grad_FBRW: Array) -> tuple[Array, None, None]:
    slots_D, nothing = residuals
    grad_DRW = grad_FBRW.reshape(-1, *grad_FBRW.shape[2:])
    grad_DRW = lax.all_to_all(grad_DRW, FSDP, split_axis=0, concat_axis=0, tiled=True)
    return row_sums(how.kernels, grad_DRW, slots_D, how.slots).astype(nothing.dtype), None, None


_exchanged.defvjp(_exchange, _exchange_back)


def take_rows(slots_B: Int[Array, " B"], dtype: Any, kernels: Kernels) -> TakeFactors:
    """Return what takes each row's own factors out of those of a layer's maps, of all maps at once.

    Factors that are not split over fsdp stay as they are, and so do those of experts. So do all where there
    are as many rows as slots: then those of all slots are gathered, each when it is used.
    """
    devices = lax.axis_size(FSDP)
    slots_D = slots_B if devices == 1 else lax.all_gather(slots_B, FSDP, axis=0, tiled=True)

    def take(lora: Named[Lora[Array]]) -> Named[Lora[Array]]:
        pairs = {name: lora[name] for name in lora if _is_split(lora[name])}
        stacks = [stack for pair in pairs.values() for stack in (pair.a, pair.b)]
        if not stacks or slots_B.shape[0] >= stacks[0].shape[0]:
            return lora
        how = _Stack(stacks[0].shape[0], 0, dtype, kernels)
        rows_FBRW: Any = _exchanged(how, jnp.concatenate(stacks, axis=2), slots_B, slots_D)
        ends = list(accumulate(stack.shape[2] for stack in stacks))
        parts = [_joined(part) for part in jnp.split(rows_FBRW, ends[:-1], axis=3)]
        rows = zip(parts[::2], parts[1::2], strict=True)
        taken = {name: RowsLora(a, b) for name, (a, b) in zip(pairs, rows, strict=True)}
        return Named({name: taken.get(name, lora[name]) for name in lora})

    return take


def _is_split(lora: Lora[Array]) -> bool:
    """Say whether both factors are split over fsdp, and are not those of experts."""
    if not isinstance(lora, StoredLora) or lora.a.ndim != 3 or lora.b.ndim != 3:
        return False
    return lora.a.shape[-1] != lora.width_in and lora.b.shape[-1] != lora.width_out


def _joined(part_FBRW: Array) -> Array:
    """[F, B, R, W / F] -> [B, R, W]"""
    part_BRFW = jnp.moveaxis(part_FBRW, 0, 2)
    return part_BRFW.reshape(*part_BRFW.shape[:2], -1)


def row_lora(slots_B: Int[Array, " B"], scale_S: Float[Array, " S"], kernels: Kernels) -> ApplyLora:
    """Apply its own adapter to each row."""

    def apply(x_BTI: Array, lora: Lora[Array]) -> Array:
        def factor(stack_SRW: Array, width: int) -> Array:
            how = _Stack(stack_SRW.shape[0], width, x_BTI.dtype, kernels)
            return _rows_of(how, stack_SRW, slots_B)

        a_BRI, b_BRO = lora.a, lora.b
        if not isinstance(lora, RowsLora):
            width_out = lora.width_out if isinstance(lora, StoredLora) else lora.b.shape[-1]
            a_BRI, b_BRO = factor(lora.a, x_BTI.shape[-1]), factor(lora.b, width_out)
        scale_B = scale_S[slots_B].astype(x_BTI.dtype)
        h_BTR = jnp.einsum("BTI,BRI->BTR", x_BTI, a_BRI) * scale_B[:, None, None]
        h_BTR = checkpoint_name(h_BTR, "low_rank")
        return jnp.einsum("BTR,BRO->BTO", h_BTR, b_BRO)

    return apply
