"""The rows of a training run that only holds a checkpoint, and cannot be trained."""

import time

import msgspec
from sqlalchemy import Executable, insert

from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage.tables import ModelRow, SessionRow
from spmd_tx.protocol.commands import AdapterSpec

ENDED_BECAUSE = "it only holds a copy of a checkpoint"


def new_session(session_id: str, project_id: str | None, owner: str) -> Executable:
    """The session ends at once, since nobody sends its heartbeats."""
    now = clock.now()
    return insert(SessionRow).values(
        id=session_id,
        created_at=now,
        ended_at=now,
        ended_because=ENDED_BECAUSE,
        tags=[],
        project_id=project_id,
        owner=owner,
    )


def new_model(run_id: str, source: str, base_model: str, adapter: AdapterSpec) -> Executable:
    """``source`` says in words, or with a tinker:// path, what the checkpoint is a copy of."""
    return insert(ModelRow).values(
        id=run_id,
        session_id=run_id.rpartition(":train:")[0],
        base_model=base_model,
        created_at=time.time(),
        copied_from=source,
        **msgspec.to_builtins(adapter),
    )
