"""Choices of kernels for tests and measurements."""

import jax
from msgspec.structs import replace

from spmd_tx.protocol.kernels import PALLAS, PRODUCTS, Kernels, Platform, products_of, references
from spmd_tx.sharding.mesh import make_mesh, platform


def kernels_of(name: str, *, interpret: bool = True) -> Kernels:
    """Choose an implementation for every task, on the platform that has it; kernels run as plain programs."""
    platforms: list[Platform] = [platform for platform, names in PRODUCTS.items() if name in names]
    platform = platforms[0] if platforms else "cpu"
    attention = PALLAS.get(platform, name)
    return Kernels(platform, rows=attention, pages=attention, products=name, interpret=interpret)


def kernels_here(**others: str) -> Kernels:
    """Choose this platform's own products, and references for all else but ``others``."""
    here = platform(make_mesh(1, 1, 1, jax.devices()[:1]))
    return replace(references(here), **{"products": products_of(here)[0]} | others)
