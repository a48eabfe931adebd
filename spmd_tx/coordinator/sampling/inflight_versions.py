"""The versions of saves of kind inflight, of which each follows the last one of its model."""

from collections.abc import Callable, Set
from dataclasses import dataclass, field

from spmd_tx.coordinator.sampling.bank import VersionKey
from spmd_tx.coordinator.sampling.version_store import FROM_DISK


@dataclass
class _Published:
    """Holds the versions of a model that were not given up."""

    by_seq_id: dict[int, VersionKey] = field(default_factory=dict)  # by the seq_id of their save
    answered: int = FROM_DISK  # seq_id of the last answered save


class InflightVersions:
    """Tracks the inflight versions of all models in one generation of workers."""

    def __init__(self, give_up: Callable[[VersionKey], None]) -> None:
        self._give_up = give_up
        self._of_model: dict[str, _Published] = {}

    def newest(self, model_id: str) -> VersionKey | None:
        published = self._of_model.get(model_id)
        return published.by_seq_id[max(published.by_seq_id)] if published and published.by_seq_id else None

    def seq_id_of(self, model_id: str, version: VersionKey) -> int | None:
        """Return the number of the save that published a version; None: it is not known, or given up."""
        published = self._of_model.get(model_id, _Published()).by_seq_id
        return next((seq_id for seq_id, each in published.items() if each == version), None)

    def leave_disk(self, model_id: str, newer: VersionKey) -> None:
        """Give up what was found on disk, now that a newer version is."""
        found = self._of_model.pop(model_id, _Published()).by_seq_id.get(FROM_DISK, newer)
        if found != newer:
            self._give_up(found)

    def publish(self, model_id: str, seq_id: int, version: VersionKey) -> None:
        """Add a version that commands sent from now on find on the device."""
        published = self._of_model.setdefault(model_id, _Published())
        published.by_seq_id[seq_id] = version
        self._tidy(published)

    def answered(self, model_id: str, seq_id: int) -> None:
        """Note that the model's requests up to this one are durable."""
        published = self._of_model.setdefault(model_id, _Published())
        published.answered = max(published.answered, seq_id)
        self._tidy(published)

    def forget(self, versions: Set[VersionKey]) -> None:
        """Forget versions whose sessions have ended."""
        for model_id, published in list(self._of_model.items()):
            if not published.by_seq_id or not versions.isdisjoint(published.by_seq_id.values()):
                del self._of_model[model_id]

    def _tidy(self, published: _Published) -> None:
        """Give up the versions before the newest durable one."""
        sure = max((each for each in published.by_seq_id if each <= published.answered), default=FROM_DISK)
        for seq_id in [each for each in published.by_seq_id if each < sure]:
            self._give_up(published.by_seq_id.pop(seq_id))
