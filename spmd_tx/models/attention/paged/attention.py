"""Attention to the pages of rows, by the implementation that is chosen.

Each reads as many keys and values as a row has, whatever the width of its table, in an order that follows
from the row alone: neither other rows nor what stands behind its last token change a bit of it. Kernels are
used only where worker/self_tests/paged.py has found their results correct on the device.

Dimension key as in kv_cache.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from jax import Array
from jaxtyping import Float, Int

from spmd_tx.models.attention.page_loop import Pools, attend_pages, attend_row_by_row
from spmd_tx.models.attention.paged import mosaic, triton
from spmd_tx.models.attention.paged.parts import CommonParts
from spmd_tx.models.attention.paged.prefixes import PrefixGroups
from spmd_tx.protocol.kernels import PALLAS, Kernels, Platform

# (queries [B, T, N, E], pools, layer, tables [B, N], positions [B, T]; -1: sees nothing) -> [B, T, N, E]
PagedAttention = Callable[..., Array]

WIDEST_HEAD = {"tpu": 256, "gpu": 576}  # by platform


def _row_by_row(
    q_BTNE: Array, pools: Pools, index: Array, tables_BN: Array, positions_BT: Array, **sight: Any
) -> Array:
    """For CPUs, where several tokens of a row share what is read of its pages."""
    if q_BTNE.shape[1] > 1:
        return attend_pages(q_BTNE, pools, index, tables_BN, positions_BT, **sight)
    return attend_row_by_row(q_BTNE[:, 0], pools, index, tables_BN, positions_BT[:, 0], **sight)[:, None]


IMPLEMENTATIONS: dict[str, Callable[[bool], PagedAttention]] = {  # the fastest first; of Kernels.interpret
    "mosaic": lambda interpret: partial(mosaic.attend, interpret=interpret),
    "triton": lambda interpret: partial(triton.attend, interpret=interpret),
    "reference": lambda _: attend_pages,
    "row_by_row": lambda _: _row_by_row,
}

SHARING: dict[str, Callable[..., Any]] = {"mosaic": mosaic.sharing, "triton": triton.sharing}


def paged_attention(
    kernels: Kernels,
    q_BTNE: Float[Array, "B T N E"],
    pools: Pools,
    index: Array,
    tables_BN: Int[Array, "B _"],
    positions_BT: Int[Array, "B T"],
    **sight: Any,
) -> Float[Array, "B T N E"]:
    """Attend from all tokens of a row to the tokens up to their positions; grouped queries.

    ``sight`` are the window and sinks of page_loop.attend_pages, and ``shared`` what ``sharing`` has found.
    The kernel for TPUs reads no pool as keys and values alike.
    """
    name = kernels.pages
    if pools[1] is None and name == "mosaic":
        name = "reference"
        sight.pop("shared", None)
    return IMPLEMENTATIONS[name](kernels.interpret)(q_BTNE, pools, index, tables_BN, positions_BT, **sight)


def sharing(
    kernels: Kernels,
    q_shape: tuple[int, int, int],
    pool: Array,
    tables_BN: Int[Array, "B N"],
    lasts_B: Int[Array, " B"],
) -> dict[str, CommonParts | PrefixGroups]:
    """Return what is to be told all layers of a decode without a window: which rows read pages together.

    It is nothing for implementations in which none do. Parameters are those of triton.sharing.
    """
    find = SHARING.get(kernels.pages)
    shared = None if find is None else find(q_shape, pool, tables_BN, lasts_B)
    return {} if shared is None else {"shared": shared}


def candidates(platform: Platform, head_dim: int, page_size: int, is_bfloat16: bool) -> list[str]:
    """List the implementations that a platform and these sizes allow, the fastest first."""
    if platform == "cpu":
        return ["row_by_row"]
    is_possible = is_bfloat16 and head_dim <= WIDEST_HEAD.get(platform, 0)
    is_possible = is_possible and takes(PALLAS[platform], head_dim, page_size)
    return [PALLAS[platform], "reference"] if is_possible else ["reference"]


def takes(implementation: str, head_dim: int, page_size: int) -> bool:
    """Return whether an implementation can have heads of this width and pages of so many tokens."""
    match implementation:
        case "mosaic":
            return head_dim % mosaic.LANES == 0 and page_size % mosaic.SUBLANES == 0
        case "triton":
            return triton.fits(head_dim, page_size)
        case _:
            return True
