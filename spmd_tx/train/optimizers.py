"""The optimizers that a run can have, as the SDK sends them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tinker import types


@dataclass(frozen=True)
class TrainOptimizer:
    """Declares an optimizer. Its other parameters have the defaults of the SDK."""

    config: Any  # that a model is created with
    params: Callable[..., Any]  # of a step, from its learning rate
    supervised_rate: float  # learning rate that suits most adapters
    reinforcement_rate: float

    @property
    def name(self) -> str:
        """The name that the server knows."""
        return self.config.type


OPTIMIZERS: Mapping[str, TrainOptimizer] = {
    each.name: each
    for each in (
        TrainOptimizer(types.AdamOptimizerConfig(), types.AdamParams, 3e-4, 4e-5),
        TrainOptimizer(types.DimuonOptimizerConfig(), types.DimuonParams, 0.02, 0.003),
    )
}
