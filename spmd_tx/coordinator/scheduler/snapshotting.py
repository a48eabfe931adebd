"""Takes the snapshots of one generation of workers, and records those that are complete."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from spmd_tx.coordinator.checkpoints.snapshots import Snapshots
from spmd_tx.coordinator.requests.queue import RequestQueue
from spmd_tx.coordinator.runtime.containment import contained, report
from spmd_tx.coordinator.scheduler.generation import GenerationParts
from spmd_tx.coordinator.scheduler.request_table import RequestTable
from spmd_tx.coordinator.scheduler.tasks import Tasks
from spmd_tx.coordinator.training.line import ModelLine
from spmd_tx.errors import DamagedBody, MeshError

logger = logging.getLogger(__name__)


@dataclass
class SnapshotKeeper:
    """Takes snapshots after optimizer steps, one of a model at a time."""

    log: RequestQueue
    snapshots: Snapshots
    parts: GenerationParts
    table: RequestTable
    tasks: Tasks
    is_lost: Callable[[], bool]
    wake: Callable[[], None]
    _keeping: set[asyncio.Task[None]] = field(default_factory=set)  # snapshots that are being taken
    _waiting: set[asyncio.Task[None]] = field(default_factory=set)  # for outcomes: they end with the workers

    def take_if_due(self, entry: ModelLine, seq_id: int) -> None:
        """Take a snapshot if one is due; the model has just begun an optimizer step."""
        if self.snapshots.is_due(entry.model.id):
            taking = self.parts.training.take_snapshot(entry.model, seq_id)
            keeping = self.tasks.spawn(self._keep(entry, seq_id, taking))
            self._keeping.add(keeping)
            keeping.add_done_callback(self._keeping.discard)

    async def take_all(self, entries: Iterable[ModelLine]) -> None:
        """Take one of every model whose state is that after an optimizer step, one after the other."""
        for entry in entries:
            while self._keeping:  # perhaps the very one that is wanted
                await asyncio.wait(self._keeping)
            seq_id = entry.stepped
            if seq_id is not None and not self.snapshots.is_behind(entry.model.id, seq_id):
                await self._keep(entry, seq_id, self.parts.training.take_snapshot(entry.model, seq_id))

    def abandon(self) -> None:
        """Stop waiting for outcomes: the workers are lost, and some will not come."""
        for task in self._waiting:
            task.cancel()

    async def _keep(self, entry: ModelLine, seq_id: int, taking: Coroutine[Any, Any, str | None]) -> None:
        """Record a snapshot once its files are complete and every request in it is answered."""
        model, adapter = entry.model, entry.model.adapter  # a load that comes in between may change it
        try:
            problem = await taking
            if problem is None:
                if not await self._are_stored(model.id, seq_id):
                    return
                path = self.snapshots.staged(model.id, seq_id)
                await self.snapshots.record(model.id, seq_id, path, adapter)
        except MeshError:
            return
        except (OSError, SQLAlchemyError, DamagedBody) as error:
            problem = str(error)
        except BaseException as error:
            problem = report(error, f"taking a snapshot of {model.id}")
        if problem is not None:
            logger.warning("no snapshot of %s behind request %d: %s", model.id, seq_id, problem)

    async def note_answered(self, model_id: str, seq_id: int) -> None:
        """Give up older versions once a save of weights to sample from is answered."""
        with contained(f"noting what {model_id} has saved"):
            if await self._are_stored(model_id, seq_id):
                self.parts.versions.inflight.answered(model_id, seq_id)
                self.wake()

    async def _are_stored(self, model_id: str, last: int) -> bool:
        """Wait until a model's requests up to a number are answered durably; False: the workers are lost."""
        if self.is_lost():  # nobody would cancel the waiting
            return False
        unfinished = self.table.unfinished_of_line(model_id)
        ids = [request.id for request in unfinished if request.seq_id <= last]
        storing = asyncio.create_task(self.log.stored(ids))
        self._waiting.add(storing)
        storing.add_done_callback(self._waiting.discard)
        storing.add_done_callback(self.tasks.notice)
        await asyncio.wait([storing])
        return not storing.cancelled()
