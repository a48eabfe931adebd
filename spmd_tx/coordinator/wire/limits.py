"""The limits that the served model and the server's options set for requests. Pure."""

from dataclasses import dataclass

from spmd_tx.bounds import Bounds
from spmd_tx.errors import InvalidRequest
from spmd_tx.images.processor import ImageProcessor

DEFAULT_BOUNDS = Bounds()
WHO_SEES = "(models with a vision tower take images unless the operator has set --image-tokens 0)"


@dataclass(frozen=True)
class Limits:
    """Holds what requests are checked against."""

    vocab_size: int
    max_context: int  # tokens
    max_rank: int  # of adapters; 0: all weights are trained
    bounds: Bounds = DEFAULT_BOUNDS
    images: ImageProcessor | None = None  # None: the model takes text alone


def check_number(name: str, number: int, bounds: Bounds, limit: str) -> None:
    """Raise InvalidRequest for a number that is over a limit of the bounds.

    Clients number what they create in a session from 0, so the number bounds how many there are.
    """
    bound: int = getattr(bounds, limit)
    if number >= bound:
        raise InvalidRequest(
            f"{name} is {number}; in one session it must be below {bound}, so begin a new session, or ask "
            f"the operator to raise the limit {limit}"
        )


def vocabulary(limits: Limits) -> str:
    return f"IDs of this model are 0 to {limits.vocab_size - 1}"
