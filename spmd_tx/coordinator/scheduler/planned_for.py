"""Says for whom something is planned, and who may be planned for at once."""

from collections.abc import Sequence
from dataclasses import dataclass

from spmd_tx.coordinator.training.model import TrainedModel


@dataclass(frozen=True)
class PlannedFor:
    """Holds those for whom a command was being planned, or a reply taken in."""

    models: tuple[TrainedModel, ...] = ()  # for their next steps
    samples: frozenset[str] = frozenset()  # requests

    @property
    def names(self) -> set[str]:
        return {name_of(model) for model in self.models} | self.samples

    @property
    def requests(self) -> set[str]:
        """Their ids, without the work that the server does for itself."""
        heads = {model.unsent[0].request_id for model in self.models if model.unsent}
        return (heads | self.samples) - {""}

    def __str__(self) -> str:
        return f"planning for {', '.join(sorted(self.names)) or 'nobody in particular'}"


def name_of(model: TrainedModel) -> str:
    """Return the request of a model's next step, or the model if that step is the server's own."""
    return (model.unsent[0].request_id if model.unsent else "") or model.id


def together(names: Sequence[str], lonely: set[str]) -> set[str]:
    """Return those that may be planned for at once: all that are not lonely, or the first one if all are."""
    return set(names) - lonely or set(names[:1])


def apart(models: Sequence[TrainedModel], lonely: set[str]) -> list[list[TrainedModel]]:
    """Return the groups of models whose steps may share a command: a lonely one is a group of its own."""
    others = [model for model in models if name_of(model) not in lonely]
    groups = [[model] for model in models if name_of(model) in lonely]
    return [others, *groups] if others else groups
