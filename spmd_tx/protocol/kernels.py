"""Which of several implementations the programs of all workers use."""

from typing import Literal

import msgspec

Platform = Literal["cpu", "gpu", "tpu"]  # of JAX; "gpu": NVIDIA's

# In which language a platform's own kernels are written, which is their name among implementations.
PALLAS: dict[Platform, str] = {"tpu": "mosaic", "gpu": "triton"}

# Their names for products and sums, the fastest first. "mosaic_gpu" is Pallas' Mosaic GPU for those that are
# written in it, and Triton for the rest.
PRODUCTS: dict[Platform, list[str]] = {"tpu": ["mosaic"], "gpu": ["mosaic_gpu", "triton"]}
MOSAIC_GPUS = ((9, 0), (10, 0))  # the compute capabilities that it knows: those of Hopper and Blackwell


def products_of(platform: Platform, capability: tuple[int, int] | None = None) -> list[str]:
    """Return which products and sums devices may use, the fastest first; None: it is not known."""
    names = PRODUCTS.get(platform, [])
    if capability is not None and capability not in MOSAIC_GPUS:
        names = [name for name in names if name != "mosaic_gpu"]
    return [*names, "reference"]


class Kernels(msgspec.Struct, frozen=True):
    """Holds a choice for each task that has several implementations; the defaults are those of CPUs.

    Workers choose when they start, by self-tests (worker/accelerator.py).
    """

    platform: Platform = "cpu"
    rows: str = "reference"  # attention to packed rows: of models/attention/packed_rows.py's IMPLEMENTATIONS
    pages: str = "row_by_row"  # attention to pages: of models/attention/paged/attention.py's
    products: str = "reference"  # of experts, with the sums of training: of models/experts/product.py's
    decode: str = "plain"  # of worker/decode_ways.py's WAYS
    images: str = "reference"  # attention among patches: of models/vision/attention.py's IMPLEMENTATIONS
    interpret: bool = False  # whether Pallas kernels run as plain XLA programs, in tests

    @property
    def has_gpu_products(self) -> bool:
        """Says whether products and sums have kernels for NVIDIA GPUs."""
        return self.products in PRODUCTS["gpu"]


def references(platform: Platform) -> Kernels:
    """Return the choices that need no kernel."""
    return Kernels(platform, pages="row_by_row" if platform == "cpu" else "reference")
