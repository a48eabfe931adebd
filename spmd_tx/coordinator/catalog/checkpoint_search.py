"""Searches checkpoints, newest first, page by page. Reads only."""

from collections.abc import Sequence
from contextlib import aclosing
from uuid import UUID

from sqlalchemy import ColumnElement, select
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.catalog import listings
from spmd_tx.coordinator.catalog.searched_page import SearchedPage, newest_first, of_owner
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.tables import CheckpointRow, ModelRow, SessionRow
from spmd_tx.coordinator.tenancy.callers import Caller, is_seen
from spmd_tx.coordinator.wire.checkpoints import (
    CheckpointSearchCursor,
    CheckpointSearchRequest,
    CheckpointSearchResponse,
)
from spmd_tx.coordinator.wire.limits import DEFAULT_BOUNDS
from spmd_tx.coordinator.wire.moments import write_moment
from spmd_tx.coordinator.wire.sessions import as_texts
from spmd_tx.errors import InvalidRequest, NotFound

MOST_NUMBER = 2**31 - 1  # of the column


async def search(
    database: Database, request: CheckpointSearchRequest, caller: Caller, bounds: Bounds = DEFAULT_BOUNDS
) -> CheckpointSearchResponse:
    """Find one page, which may be short, or even empty, where the search takes long.

    Metadata is compared here, since databases differ in JSON. Raises NotFound for a project without a session
    that the caller may see.
    """
    async with database.reading() as db:
        await _check_projects(db, request.project_ids or [], caller)
        page = SearchedPage[CheckpointRow](request.limit, bounds)
        query = select(CheckpointRow).where(*_conditions(request, caller))
        cursor = request.cursor and (request.cursor.last_created_at, _last_number(request.cursor))
        rows = newest_first(db, query, CheckpointRow, CheckpointRow.number, cursor)
        async with aclosing(rows) as candidates:
            async for row in candidates:
                is_wanted = request.user_metadata.items() <= (as_texts(row.user_metadata) or {}).items()
                if not page.look_at(row, listings.on_the_wire(row) if is_wanted else None):
                    break
    last = page.last
    return CheckpointSearchResponse(
        [listings.on_the_wire(row) for row in page.matches],
        last and CheckpointSearchCursor(write_moment(last.created_at), str(UUID(int=last.number))),
    )


async def _check_projects(db: AsyncSession, project_ids: Sequence[str], caller: Caller) -> None:
    visible = select(SessionRow.project_id).where(
        is_seen(caller, SessionRow.owner), SessionRow.project_id.in_(project_ids)
    )
    missing = set(project_ids) - set(await db.scalars(visible.distinct()))
    if missing:
        raise NotFound(
            f"project {min(missing)!r} has no sessions that you may see; leave it out of project_ids"
        )


def _conditions(request: CheckpointSearchRequest, caller: Caller) -> list[ColumnElement[bool]]:
    conditions = [is_seen(caller, CheckpointRow.owner), listings.is_there()]
    conditions += of_owner(request.owner, CheckpointRow.owner, caller)
    if request.checkpoint_type is not None:
        kinds = [kind for kind, type in listings.TYPES.items() if type == request.checkpoint_type]
        conditions.append(CheckpointRow.kind.in_(kinds))
    if request.base_models is not None:
        conditions.append(CheckpointRow.base_model.in_(request.base_models))
    if request.project_ids is not None:
        runs = select(ModelRow.id).join(SessionRow, SessionRow.id == ModelRow.session_id)
        conditions.append(
            CheckpointRow.run_id.in_(runs.where(SessionRow.project_id.in_(request.project_ids)))
        )
    return conditions


def _last_number(cursor: CheckpointSearchCursor) -> int:
    try:
        number = UUID(cursor.last_checkpoint_uuid).int
    except ValueError:
        number = MOST_NUMBER + 1
    if number > MOST_NUMBER:
        raise InvalidRequest(
            f"cursor.last_checkpoint_uuid is {cursor.last_checkpoint_uuid!r}; send next_cursor as it came"
        )
    return number
