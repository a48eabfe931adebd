"""What outcomes say about the samples of a run: what was drawn, and what was learned from it. Pure."""

from collections.abc import Mapping
from typing import NamedTuple


class DrawnFacts(NamedTuple):
    """Describes the answers of one sample request."""

    prompt: int  # hash of its tokens
    answers: int
    cut_off: int  # answers that ended at their longest


class LearnedFacts(NamedTuple):
    """Holds the advantages that a training request gave to samples, as its provenance spans name them."""

    advantages: Mapping[str, Mapping[int, float]]  # by request and place; the mean over tokens that count
