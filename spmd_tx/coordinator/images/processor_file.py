"""Finds the file that says how a model's images are prepared."""

from pathlib import Path

from spmd_tx.errors import StartError
from spmd_tx.images.processor import FILES, ImageProcessor, read_processor


def find_processor(directory: Path) -> ImageProcessor:
    """Read the processor of a model that sees. Blocks. Raises StartError, also where there is no file."""
    for name in FILES:
        path = directory / name
        if path.is_file():
            return read_processor(path.read_bytes(), str(path))
    raise StartError(
        f"{directory} has no {FILES[0]}, which says how images are prepared; fetch the model again, with it"
    )
