"""Small pictures, as the bytes of PNG and JPEG files."""

import base64
import io
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from spmd_tx.coordinator.bases.served_base import ServedBase
from spmd_tx.images.processor import ImageProcessor


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


def in_json(content: bytes) -> dict[str, str]:
    """Return an image chunk of a prompt, as JSON."""
    return {"data": base64.b64encode(content).decode(), "format": "png", "type": "image"}


def let_see(base: ServedBase) -> None:
    """Let a model take images, of one token for each 32 x 32 pixels."""
    limits = replace(base.limits, images=ImageProcessor(least_pixels=32 * 32))
    object.__setattr__(base, "limits", limits)
