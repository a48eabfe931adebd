"""Which weights the samplers of kind "inflight" draw from: the newest that their model has published.

Each save publishes a version of its own, so that a request is sampled from one version to its end. An older
one is given up when a newer one is sure to be there after a crash, too: when its save has been answered.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass, field

from spmd_tx.coordinator.bank import VersionKey

FROM_DISK = -1  # stands for the seq_id of a save that lies before all that was run again


@dataclass
class _Published:
    """The versions of a model that were not given up."""

    by_seq_id: dict[int, VersionKey] = field(default_factory=dict)  # of their saves
    answered: int = FROM_DISK  # the last save that was


class InflightVersions:
    """Of all models, in one generation of workers."""

    def __init__(self, give_up: Callable[[VersionKey], None]) -> None:
        self._give_up = give_up
        self._of_model: dict[str, _Published] = {}

    def newest(self, model_id: str) -> VersionKey | None:
        published = self._of_model.get(model_id)
        return published.by_seq_id[max(published.by_seq_id)] if published and published.by_seq_id else None

    def publish(self, model_id: str, seq_id: int, version: VersionKey) -> None:
        """From now on, commands that are sent find this version on the device."""
        published = self._of_model.setdefault(model_id, _Published())
        published.by_seq_id[seq_id] = version
        self._tidy(published)

    def answered(self, model_id: str, seq_id: int) -> None:
        """What the model did up to this request is durable."""
        published = self._of_model.setdefault(model_id, _Published())
        published.answered = max(published.answered, seq_id)
        self._tidy(published)

    def forget(self, versions: Set[VersionKey]) -> None:
        """Their sessions have ended."""
        for model_id, published in list(self._of_model.items()):
            if not published.by_seq_id or not versions.isdisjoint(published.by_seq_id.values()):
                del self._of_model[model_id]

    def _tidy(self, published: _Published) -> None:
        """Give up what lies before the newest version that is sure to stay."""
        sure = max((each for each in published.by_seq_id if each <= published.answered), default=FROM_DISK)
        for seq_id in [each for each in published.by_seq_id if each < sure]:
            self._give_up(published.by_seq_id.pop(seq_id))
