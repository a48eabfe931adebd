"""Says for whom something is planned, and who may be planned for at once."""

from collections.abc import Sequence
from dataclasses import dataclass

from spmd_tx.coordinator.scheduler.request_table import Danger, RequestState, RequestTable
from spmd_tx.coordinator.training.model import TrainedModel


@dataclass(frozen=True)
class PlannedFor:
    """Holds those for whom a command was being planned, or a reply taken in."""

    models: tuple[TrainedModel, ...] = ()  # for their next steps
    samples: frozenset[str] = frozenset()  # requests

    def __len__(self) -> int:
        return len(self.models) + len(self.samples)

    @property
    def requests(self) -> set[str]:
        """Their ids, without the work that the server does for itself."""
        heads = {model.unsent[0].request_id for model in self.models if model.unsent}
        return (heads | self.samples) - {""}

    def __str__(self) -> str:
        heads = {(model.unsent[0].request_id if model.unsent else "") or model.id for model in self.models}
        return f"planning for {', '.join(sorted(heads | self.samples)) or 'nobody in particular'}"


def head_of(model: TrainedModel, table: RequestTable) -> RequestState | TrainedModel:
    """Return the request of a model's next step, or the model if that step is the server's own."""
    state = table.get(model.unsent[0].request_id) if model.unsent else None
    return model if state is None else state


def isolate(planned_for: PlannedFor, table: RequestTable) -> bool:
    """Make those planned for lonely; return False if all of them were."""
    requests = [table.get(request_id) for request_id in planned_for.samples]
    heads = [head_of(model, table) for model in planned_for.models]
    others = [each for each in (*heads, *requests) if each is not None and not each.is_lonely]
    for each in others:
        if isinstance(each, TrainedModel):
            each.is_lonely = True
        else:
            table.isolate(each)
    return bool(others)


def together(models: Sequence[TrainedModel], samples: Sequence[str], table: RequestTable) -> PlannedFor:
    """Return those that may be planned for at once: all that are not lonely, or the first one if all are."""
    if not models and not samples:
        return PlannedFor()
    in_company = [model for model in models if not head_of(model, table).is_lonely]
    lonely = {state.request.id for state in table.in_danger_of(Danger.PLANNING)}
    requests = frozenset(samples) - lonely
    if not in_company and not requests:
        in_company, requests = models[:1], frozenset(() if models else samples[:1])
    return PlannedFor(tuple(in_company), requests)


def apart(models: Sequence[TrainedModel], table: RequestTable) -> list[list[TrainedModel]]:
    """Return the groups of models whose steps may share a command: a lonely one is a group of its own."""
    lonely = [model for model in models if head_of(model, table).is_lonely]
    others = [model for model in models if model not in lonely]
    groups = [[model] for model in lonely]
    return [others, *groups] if others else groups
