"""What a scheduler is told of the group whose work it does."""

from collections.abc import Callable
from dataclasses import dataclass, field

from spmd_tx.coordinator.requests.records import Request
from spmd_tx.coordinator.scheduler.siblings import Siblings
from spmd_tx.coordinator.storage.tables import ModelRow


@dataclass(frozen=True)
class ScheduledGroup:
    """Says which work of the log is the group's, and what its workers do; by default all work is."""

    takes: Callable[[Request], bool] = lambda request: True
    trains: Callable[[ModelRow], bool] = lambda model: True
    phase: Callable[[], str | None] = lambda: None  # what happens while no generation runs
    siblings: Siblings = field(default_factory=Siblings)  # of the groups of the same base model
