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
    best_of_group: int = 2  # scores whose sum ranks a group: 2 in DeepSeek-V3, 1 in V2
    factor: float = 1.0  # of all weights

    def problem(self, experts: int, chosen: int) -> str | None:
        """Say what is wrong with these numbers as a sentence without its subject, or return None."""
        if experts % self.groups:
            return f"has {experts} experts in {self.groups} groups, which must be equally large"
        if not 1 <= self.kept_groups <= self.groups:
            return f"keeps {self.kept_groups} of {self.groups} groups of experts"
        if chosen > experts // self.groups * self.kept_groups:
            return f"chooses {chosen} experts of a token in groups that hold fewer"
        return None
