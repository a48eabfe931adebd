"""Small pictures, as the bytes of PNG and JPEG files."""

import io
from typing import Any

import numpy as np
from PIL import Image


def noise(height: int, width: int, seed: int = 0, channels: int = 3) -> Image.Image:
    """Return a picture of smooth noise, so that resizing matters and JPEG keeps most of it."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (max(2, height // 16), max(2, width // 16), channels), np.uint8)
    mode = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}[channels]
    array = small[..., 0] if channels == 1 else small
    return Image.fromarray(array, mode).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, format: str = "png", **options: Any) -> bytes:
    """Return the bytes of a file of this picture."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def png(height: int = 64, width: int = 96, seed: int = 0) -> bytes:
    return encoded(noise(height, width, seed))


def jpeg(height: int = 64, width: int = 96, seed: int = 0) -> bytes:
    return encoded(noise(height, width, seed), "jpeg")
