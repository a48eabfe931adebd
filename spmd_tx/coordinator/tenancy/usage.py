"""Adds up what was trained, sampled and saved, by the hour, for each model and sampler."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from sqlalchemy import delete, orm
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.storage import bulk_rows
from spmd_tx.coordinator.storage.tables import ModelRow, SamplerRow, SessionRow, UsageRow
from spmd_tx.coordinator.tenancy.spent import NO_USAGE, Usage
from spmd_tx.coordinator.wire import checkpoint_paths

HOUR_SECONDS = 3600
KEPT_SECONDS = 400 * 24 * 3600.0  # a year, and some days to look at it

NOBODY = {"session_id": None, "owner": "", "key_id": None, "run_id": None, "base_model": None}
_MORE = ", ".join(f"{name} = usage.{name} + excluded.{name}" for name in Usage._fields)


class Item(NamedTuple):
    """Holds the usage of one request of a model or sampler."""

    line: str
    session_id: str
    usage: Usage


def add(db: orm.Session, items: Iterable[Item], now: float) -> None:
    """Count requests towards the hour of ``now``."""
    hour = int(now) // HOUR_SECONDS * HOUR_SECONDS
    sums: dict[tuple[str, str], Usage] = defaultdict(Usage)
    for line, session_id, usage in items:
        if usage != NO_USAGE:
            totals = sums[line, session_id]
            sums[line, session_id] = Usage(*map(sum, zip(totals, usage, strict=True)))
    if not sums:
        return
    keys = [(hour, line) for line, _ in sums]
    known_lines = {line for (line,) in bulk_rows.find(db, UsageRow, ("hour", "line"), keys, ("line",))}
    rows = []
    for (line, session_id), usage in sums.items():
        is_known = line in known_lines
        owner = {**NOBODY, "session_id": session_id} if is_known else _owner_columns(db, line, session_id)
        rows.append({"hour": hour, "line": line, **owner, **usage._asdict()})
    bulk_rows.insert(db, UsageRow, rows, f"ON CONFLICT (hour, line) DO UPDATE SET {_MORE}")


async def forget(db: AsyncSession, now: float) -> None:
    await db.execute(delete(UsageRow).where(UsageRow.hour < now - KEPT_SECONDS))


def _owner_columns(db: orm.Session, line: str, session_id: str) -> dict[str, str | None]:
    """The columns beside the counts, which a line's first row in an hour sets."""
    session = db.get(SessionRow, session_id)
    model = db.get(SamplerRow, line) or db.get(ModelRow, line)
    return {
        "session_id": session_id,
        "owner": "" if session is None else session.owner,
        "key_id": session and session.key_id,
        "run_id": _run_of(model) if isinstance(model, SamplerRow) else line,
        "base_model": model and model.base_model,
    }


def _run_of(sampler: SamplerRow) -> str | None:
    if sampler.model_path is not None:
        return checkpoint_paths.parse(sampler.model_path).run_id
    return sampler.model_id
