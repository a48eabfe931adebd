"""How the router of a mixture chooses and weighs experts."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Route:
    """Declares scores, the choice among them, and the weights of the chosen experts."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True  # whether the chosen experts' weights sum to 1
    chosen_first: bool = False  # whether the softmax is over the chosen experts only
    groups: int = 1  # of equally many experts
    kept_groups: int = 1  # among whose experts a token chooses
    factor: float = 1.0  # of all weights
