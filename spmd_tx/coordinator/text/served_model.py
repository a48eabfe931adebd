"""What the coordinator knows of the base model."""

from dataclasses import dataclass
from pathlib import Path

from spmd_tx.coordinator.text.model_text import LazyModelText
from spmd_tx.images.processor import ImageProcessor
from spmd_tx.models.declared.model import Model


@dataclass(frozen=True)
class ServedModel:
    """Holds the base model's declaration and text, and where its files are."""

    directory: Path
    config: Model
    max_context: int  # tokens
    text: LazyModelText
    images: ImageProcessor | None = None  # None: it takes text alone
