"""Lists checkpoints beside the step, the reward and the loss at their save."""

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import NamedTuple

from litestar import Controller
from litestar.params import FromQuery
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.catalog.listings import (
    NEWEST_FIRST,
    ROWS_AT_ONCE,
    ListingPage,
    fitting,
    is_there,
    on_the_wire,
)
from spmd_tx.coordinator.http.answer_guard import polled
from spmd_tx.coordinator.http.services import ApiCall
from spmd_tx.coordinator.requests.runs import metric_pages, run_metrics
from spmd_tx.coordinator.requests.runs.curve_columns import LOSS, REWARD, TOKENS, reading_order
from spmd_tx.coordinator.requests.runs.run_metrics import Values
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.row_pieces import in_pieces
from spmd_tx.coordinator.storage.tables import CheckpointRow, RunMetrics
from spmd_tx.coordinator.tenancy.callers import Caller, is_seen
from spmd_tx.coordinator.wire.checkpoints import Cursor
from spmd_tx.coordinator.wire.console.checkpoints import SavedCheckpoint, SavedCheckpointsResponse
from spmd_tx.coordinator.wire.page_room import PageRoom
from spmd_tx.errors import InvalidRequest

MOST = 100  # of a page, since the metrics of each are looked up
CHARACTERS = 200


class SavedCheckpointsController(Controller):
    path = "/console/api/checkpoints"

    @polled("/")
    async def checkpoints(
        self,
        call: ApiCall,
        run: FromQuery[str | None] = None,
        metric: FromQuery[str | None] = None,
        limit: FromQuery[int] = MOST,
        offset: FromQuery[int] = 0,
    ) -> SavedCheckpointsResponse:
        """List checkpoints, newest first, each with what was known of its run when it was saved."""
        for name, text in (("run", run), ("metric", metric)):
            if text is not None and (len(text) > CHARACTERS or "\0" in text):
                raise InvalidRequest(f"{name} is {text[:40]!r}...; give {CHARACTERS} characters at most")
        query = _SavedQuery(run, metric, ListingPage(offset, min(limit, MOST)))
        room = PageRoom(call.bounds.answer_bytes)
        key = "checkpoints", call.caller.owner, call.caller.role, query, call.services.checkpoints.changes
        return await call.services.shared_answers.get_costly(
            key, lambda: _listed(call.services.database, query, call.caller, room)
        )


class _SavedQuery(NamedTuple):
    """Selects checkpoints, and which metric stands beside them."""

    run: str | None  # None: of all runs
    metric: str | None  # None: the reward of each run
    page: ListingPage


async def _listed(
    database: Database, query: _SavedQuery, caller: Caller, room: PageRoom
) -> SavedCheckpointsResponse:
    """List what a caller sees, newest first. A page ends when its bytes are reached."""
    page = query.page.clamped()
    conditions = [is_seen(caller, CheckpointRow.owner), is_there()]
    if query.run is not None:
        conditions.append(CheckpointRow.run_id == query.run)
    rows = select(CheckpointRow).where(*conditions).order_by(*NEWEST_FIRST)
    rows = rows.offset(page.offset).limit(page.limit)
    names = set[str]()

    async def entries(db: AsyncSession) -> AsyncGenerator[SavedCheckpoint]:
        async with aclosing(in_pieces(db, rows, ROWS_AT_ONCE)) as pieces:
            async for (row,) in (each async for piece in pieces for each in piece):
                values = {} if row.seq_id is None else await run_metrics.at_save(db, row.run_id, row.seq_id)
                names.update(values)
                yield _saved(row, await _step(db, row, values), values, query.metric)

    async with database.reading() as db:
        total = await db.scalar(select(func.count()).select_from(CheckpointRow).where(*conditions)) or 0
        found = await fitting(entries(db), room)
    cursor = Cursor(page.offset, len(found), total)
    return SavedCheckpointsResponse(found, sorted(names, key=reading_order), cursor)


async def _step(db: AsyncSession, row: CheckpointRow, values: Values) -> int | None:
    """Return the steps before a save; None also for a run whose metrics were deleted in the meantime."""
    if row.seq_id is None:
        return None
    known = select(RunMetrics.number).where(RunMetrics.line == row.run_id).limit(1)
    if not values and await db.scalar(known) is None:
        return None
    return await metric_pages.steps_until(db, row.run_id, row.seq_id)


def _saved(row: CheckpointRow, step: int | None, values: Values, metric: str | None) -> SavedCheckpoint:
    rewards = (name for name in sorted(values, key=reading_order) if re.search(REWARD, name))
    name = next(rewards, None) if metric is None else metric
    loss, tokens = values.get(LOSS), values.get(TOKENS)
    return SavedCheckpoint(
        checkpoint=on_the_wire(row),
        step=step,
        metric=name,
        value=None if name is None else values.get(name),
        loss=loss / tokens if loss is not None and tokens else None,
    )
