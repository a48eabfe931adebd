"""Passes requests on to the groups of their base model, as the one scheduler that routes see."""

from collections.abc import Mapping, Sequence

from spmd_tx.coordinator.bases.bases import Bases
from spmd_tx.coordinator.groups.group import WorkerGroup
from spmd_tx.coordinator.groups.of_base import GroupsOfBase
from spmd_tx.coordinator.requests.queue import RequestQueue
from spmd_tx.coordinator.requests.records import Failed, QueueStatus, Request, by_operator
from spmd_tx.coordinator.scheduler.scheduler import Scheduler
from spmd_tx.coordinator.training import custom_loss_catalog


def key_of(request: Request, bases: Bases) -> str:
    """Return the key of a request's base. Custom losses belong to none; the first that is served has them."""
    return bases.default.key if request.kind == custom_loss_catalog.KIND else bases.key_in_log(request.base)


class Router:
    """Knows whose groups carry out a request, and keeps those whose base model is not served now."""

    def __init__(self, log: RequestQueue, bases: Bases, groups: Mapping[str, GroupsOfBase]) -> None:
        """``groups`` are by the key of their base model."""
        self._log = log
        self._bases = bases
        self._of_base = dict(groups)
        self._stranded: dict[str, Request] = {}  # by id
        for request in log.unfinished():
            if key_of(request, bases) not in self._of_base:
                self._stranded[request.id] = request

    def add(self, group: WorkerGroup) -> None:
        """Take a group that could not be opened before. Its scheduler has found its requests in the log."""
        self._of_base.setdefault(group.base.key, group.beside)
        for request in list(self._stranded.values()):
            if key_of(request, self._bases) == group.base.key:
                del self._stranded[request.id]

    @property
    def has_unfinished(self) -> bool:
        """Whether any group has work to do."""
        return any(scheduler.has_unfinished for scheduler in self._schedulers)

    def arrive(self, request: Request) -> None:
        """Take a new request, which is in the log."""
        groups = self._of_base.get(key_of(request, self._bases))
        if groups is None:
            self._stranded[request.id] = request
        else:
            groups.arrive(request)

    def consume(self, model_id: str, seq_id: int) -> None:
        """Note that a request with this number was refused before it got into the log."""
        for scheduler in self._schedulers:
            scheduler.consume(model_id, seq_id)

    def cancel(self, request_id: str) -> None:
        """End a sample that nobody waits for any more. Other requests cannot be cancelled."""
        stranded = self._stranded.get(request_id)
        if stranded is not None and stranded.kind == "sample":
            self._fail_stranded(stranded, Failed("the sample was cancelled by its client", "user"))
        for scheduler in self._schedulers:
            scheduler.cancel(request_id)

    def give_up(self, request_id: str, why: str) -> bool:
        """Fail a request on behalf of the operator; False when it is too late."""
        stranded = self._stranded.get(request_id)
        if stranded is not None:
            self._fail_stranded(stranded, Failed(by_operator(why), "server"))
            return True
        return all(scheduler.give_up(request_id, why) for scheduler in self._schedulers)

    def session_ended(self, session_id: str) -> None:
        for scheduler in self._schedulers:
            scheduler.session_ended(session_id)

    def retire(self, samplers: Mapping[str, str]) -> None:
        """Give up versions that were not used for long. Only groups that may use a folder delete it."""
        of_keys = {sampler: self._bases.key_of_row(name) for sampler, name in samplers.items()}
        for key, groups in self._of_base.items():
            groups.retire([sampler for sampler, of_key in of_keys.items() if of_key == key])

    def status(self, request_id: str) -> QueueStatus:
        stranded = self._stranded.get(request_id)
        if stranded is not None:
            return QueueStatus("paused_capacity", self._bases.absence(key_of(stranded, self._bases)))
        for scheduler in self._schedulers:
            if scheduler.holds(request_id):
                return scheduler.status(request_id)
        return QueueStatus("active", None)

    def group_of(self, request: Request) -> str | None:
        """Name the group that has an unfinished request; None: its base model is not served now."""
        groups = self._of_base.get(key_of(request, self._bases))
        return None if groups is None else groups.group_of(request)

    @property
    def _schedulers(self) -> Sequence[Scheduler]:
        return [scheduler for groups in self._of_base.values() for scheduler in groups.schedulers]

    def _fail_stranded(self, request: Request, failed: Failed) -> None:
        del self._stranded[request.id]
        self._log.resolve(request.id, failed)
