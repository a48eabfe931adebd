"""Decodes an image and cuts it into patches. Runs in a child process only: Pillow is foreign code.

Dimension key: H, W pixels; N patch; P bytes of a patch.
"""

import io
import struct
import warnings
import zlib
from contextlib import suppress

import numpy as np
from PIL import Image, ImageOps

from spmd_tx.errors import InvalidRequest
from spmd_tx.images.headers import read_header
from spmd_tx.images.processor import CHANNELS, ImageProcessor

FORMATS = ("PNG", "JPEG")
HIGH_DEPTH = ("I;16", "I;16B", "I;16L", "I;16N", "I")

# What Pillow raises for files that are not as they should be.
UNREADABLE_IMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    ZeroDivisionError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)

Image.MAX_IMAGE_PIXELS = None  # the header was checked before


def prepare(content: bytes, processor: ImageProcessor) -> tuple[np.ndarray, int, int]:
    """Return uint8 patches [N, P], and the rows and columns of patches. Raises InvalidRequest."""
    with warnings.catch_warnings(action="ignore"):  # of odd tags
        try:
            return _patches(_upright(content), processor)
        except MemoryError:
            raise InvalidRequest(
                "the image needs more memory to be decoded than there is; send a smaller one, or the "
                "operator raises the limit image_memory_bytes"
            ) from None


def prepare_outside(content: bytes, processor: dict[str, int]) -> tuple[bytes, int, int]:
    """Do ``prepare`` for a ``LastingChild``, whose arguments and results pass through msgpack."""
    patches_NP, rows, columns = prepare(content, ImageProcessor(**processor))
    return patches_NP.tobytes(), rows, columns


def be_ready() -> None:
    """Import what ``prepare_outside`` needs: calling this does so."""


def _upright(content: bytes) -> np.ndarray:
    """Return the first frame as uint8 RGB [H, W, 3], turned as its orientation says."""
    header = read_header(content)
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.size != (header.width, header.height):
                raise InvalidRequest("the image has two sizes; save it again as a PNG or JPEG")
            image.load()
            return np.asarray(_opaque(_turned(image)))
    except UNREADABLE_IMAGE as problem:
        raise InvalidRequest(f"the image is damaged ({problem}); save it again as a PNG or JPEG") from None


def _turned(image: Image.Image) -> Image.Image:
    with suppress(*UNREADABLE_IMAGE):  # of the orientation's tags
        return ImageOps.exif_transpose(image)
    return image


def _opaque(image: Image.Image) -> Image.Image:
    """Return the image in RGB: what is transparent becomes white, and 16 bits their upper 8."""
    if image.mode in HIGH_DEPTH:  # Pillow would clip all above 255
        image = Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image.convert("RGB")


def _patches(pixels_HW3: np.ndarray, processor: ImageProcessor) -> tuple[np.ndarray, int, int]:
    """Resize, and cut into blocks of patches that become one token, each flattened channel, y, x."""
    size, side, merge = processor.resized(*pixels_HW3.shape[:2]), processor.patch, processor.merge
    if pixels_HW3.shape[:2] != (size.height, size.width):
        resized = Image.fromarray(pixels_HW3).resize((size.width, size.height), Image.Resampling.BICUBIC)
        pixels_HW3 = np.asarray(resized)
    rows, columns = size.rows, size.columns
    blocks = pixels_HW3.reshape(rows // merge, merge, side, columns // merge, merge, side, CHANNELS)
    patches_NP = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, processor.patch_bytes)
    return np.ascontiguousarray(patches_NP), rows, columns
