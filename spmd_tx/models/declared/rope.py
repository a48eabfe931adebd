"""Rotary position embeddings (Su et al. 2021) as configurations declare them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rope:
    """Declares the angles by which a head's numbers are rotated."""

    theta: float
