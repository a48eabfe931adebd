"""How a model's images are resized, and so how many tokens they have. Pure."""

import math
from typing import NamedTuple

import msgspec

from spmd_tx.errors import InvalidRequest, StartError

MOST_RATIO = 200  # of the longer side to the shorter one
CHANNELS = 3
MEAN = STD = 0.5  # of each channel's values between 0 and 1; the worker computes (value / 255 - MEAN) / STD
BICUBIC = 3  # Pillow's number
FIXED = (  # options of which the default alone is taken
    "image_mean image_std resample temporal_patch_size patch_size merge_size do_resize do_rescale "
    "do_normalize do_convert_rgb".split()
)
FILES = ("preprocessor_config.json", "processor_config.json")  # the first that is there


class ResizedImage(NamedTuple):
    """Holds the size of an image as the model sees it."""

    height: int  # pixels
    width: int
    rows: int  # of patches
    columns: int
    tokens: int


class ImageProcessor(msgspec.Struct, frozen=True, kw_only=True):
    """Holds what a model's ``preprocessor_config.json`` says; the defaults are Qwen3-VL's and Qwen3.5's."""

    patch: int = 16  # pixels of a side
    merge: int = 2  # patches of a side of a token
    least_pixels: int = 65_536  # after resizing
    most_pixels: int = 16_777_216

    @property
    def unit(self) -> int:
        """The pixels of a side of a token."""
        return self.patch * self.merge

    @property
    def patch_bytes(self) -> int:
        return CHANNELS * self.patch**2

    def resized(self, height: int, width: int) -> ResizedImage:
        """Say how an image is resized. Raises InvalidRequest for one that is far longer than wide.

        Each side becomes the nearest multiple of ``unit``, halves to even, unless that has too many or too
        few pixels. Exchanged sides give exchanged sides.
        """
        if max(height, width) > MOST_RATIO * min(height, width):
            raise InvalidRequest(
                f"the image has {width} x {height} pixels: one side is more than {MOST_RATIO} times the "
                "other; crop it, or send it in parts"
            )
        unit = self.unit
        h, w = round(height / unit) * unit, round(width / unit) * unit
        if h * w > self.most_pixels:
            shrink = math.sqrt(height * width / self.most_pixels)
            h, w = (max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width))
        elif h * w < self.least_pixels:
            grow = math.sqrt(self.least_pixels / (height * width))
            h, w = (math.ceil(side * grow / unit) * unit for side in (height, width))
        return ResizedImage(h, w, h // self.patch, w // self.patch, h * w // unit**2)


class _Size(msgspec.Struct):
    shortest_edge: int
    longest_edge: int


class _File(msgspec.Struct):
    """Reads a file with the options of a processor. Sizes are pixels of the whole image, not edges."""

    size: _Size | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    patch_size: int = 16
    merge_size: int = 2
    temporal_patch_size: int = 2
    image_mean: tuple[float, ...] = (MEAN,) * CHANNELS
    image_std: tuple[float, ...] = (STD,) * CHANNELS
    resample: int = BICUBIC
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    do_convert_rgb: bool = True
    rescale_factor: float = 1 / 255


class _Whole(msgspec.Struct):
    """Reads processor_config.json, which has the options in a field."""

    image_processor: _File


def read_processor(content: bytes, name: str) -> ImageProcessor:
    """Read the file called ``name``. Raises StartError for options that would need other pixels."""
    try:
        nested = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        is_whole = "image_processor" in nested
        read = msgspec.json.decode(content, type=_Whole if is_whole else _File)
    except (msgspec.DecodeError, UnicodeDecodeError) as problem:
        raise StartError(
            f"{name} cannot be read: {problem}; fetch the model again, or serve text alone"
        ) from None
    options = read.image_processor if isinstance(read, _Whole) else read
    least, most = _pixels(options, name)
    taken = _File()
    for option in FIXED:
        value, found = getattr(taken, option), getattr(options, option)
        if found != value:
            raise StartError(
                f"{name} has {option} {found!r}; images are only prepared with {value!r}, so serve text alone"
            )
    if not math.isclose(options.rescale_factor, 1 / 255, rel_tol=1e-6):
        raise StartError(
            f"{name} has rescale_factor {options.rescale_factor}; images are only prepared with 1/255"
        )
    return ImageProcessor(
        patch=options.patch_size, merge=options.merge_size, least_pixels=least, most_pixels=most
    )


def _pixels(options: _File, name: str) -> tuple[int, int]:
    if options.size is not None:
        least, most = options.size.shortest_edge, options.size.longest_edge
    elif options.min_pixels is not None and options.max_pixels is not None:
        least, most = options.min_pixels, options.max_pixels
    else:
        raise StartError(f"{name} has neither size nor min_pixels and max_pixels; fetch the model again")
    if not 0 < least <= most:
        raise StartError(
            f"{name} allows {least} to {most} pixels; the first must be positive and the smaller one"
        )
    return least, most
