"""What is written down beside outcomes, in the same transaction: usage, and deeds for the audit log."""

from collections.abc import Sequence

import msgspec
from sqlalchemy.orm import Session

from spmd_tx.coordinator.request_records import Finished, Kind, Settled
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.tenancy import audit, usage

AUDITED: dict[Kind, str] = {
    "save_weights": "checkpoint_saved",
    "save_weights_for_sampler": "checkpoint_saved",
    "save_weights_external": "checkpoint_saved",
    "load_weights": "checkpoint_loaded",
}


class _WithPath(msgspec.Struct):
    """Of the results of saves and loads, what matters here."""

    path: str | None = None  # null: a version without a name


def record(db: Session, settled: Sequence[Settled]) -> None:
    """Of outcomes that become durable now, each once."""
    items: list[usage.Item] = []
    for each in settled:
        request, outcome = each.request, each.outcome
        if not isinstance(outcome, Finished):
            continue
        spent, event = outcome.spent, AUDITED.get(request.kind)
        path = None if event is None else msgspec.json.decode(outcome.body, type=_WithPath).path
        if event is not None and path is not None:
            audit.add_by_session(db, event, request.session_id, path)
            spent = spent._replace(checkpoints=int(event == "checkpoint_saved"))
        items.append(usage.Item(request.line, request.session_id, spent))
    usage.add(db, items, clock.now())
