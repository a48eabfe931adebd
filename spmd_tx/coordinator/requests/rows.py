"""Stores and reads requests and outcomes as rows, in a transaction of the caller's."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, cast

from sqlalchemy import func, or_, orm, select
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.requests.completions import MICROSECONDS, Completion, CompletionRange, SamplerClient
from spmd_tx.coordinator.requests.records import (
    CHANGES_STATE,
    BodyPlace,
    BodyRef,
    Executed,
    Failed,
    Known,
    ModelHistory,
    NewOutcome,
    NewRow,
    Request,
    RequestKey,
    RequestKind,
    by_operator,
    not_run_again,
)
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage import bulk_rows
from spmd_tx.coordinator.storage.tables import RequestRow
from spmd_tx.errors import NotFound

BODY_COLUMNS = "body", "file", "offset", "length"  # of a payload or result


async def next_number(db: AsyncSession) -> int:
    return (await db.scalar(select(func.max(RequestRow.number))) or 0) + 1


async def highest_number(db: AsyncSession, line: str) -> int:
    """The highest seq_id of a line's executed and unfinished requests; refused ones may have any number."""
    counts = or_(RequestRow.executed, RequestRow.finished_at.is_(None))
    query = select(RequestRow.seq_id).where(RequestRow.line == line, counts)
    return await db.scalar(query.order_by(RequestRow.seq_id.desc()).limit(1)) or 0


async def last_completion(db: AsyncSession) -> int:
    """The highest completion number in the log."""
    return round((await db.scalar(select(func.max(RequestRow.finished_at))) or 0) * MICROSECONDS)


async def completions(db: AsyncSession, target: SamplerClient, span: CompletionRange) -> list[Completion]:
    """The completions of one client of a sampler, in order."""
    query = (
        select(RequestRow.finished_at, RequestRow.id, RequestRow.content_type)
        .where(
            RequestRow.line == target.sampler,
            RequestRow.seq_id.between(target.seq_ids.start, target.seq_ids.stop - 1),
            RequestRow.finished_at > span.after / MICROSECONDS,
            RequestRow.finished_at <= span.last / MICROSECONDS,
        )
        .order_by(RequestRow.finished_at)
        .limit(span.most)
    )
    return [
        Completion(round((finished_at or 0) * MICROSECONDS), id, failed=content_type is None)
        for finished_at, id, content_type in await db.execute(query)
    ]


def known(db: orm.Session, keys: Iterable[RequestKey]) -> dict[RequestKey, Known]:
    """The requests in the log under these keys."""
    columns = ("line", "seq_id", "id", "kind")
    stored = bulk_rows.find(db, RequestRow, ("line", "seq_id"), list(keys), columns)
    return {(line, seq_id): Known(id, kind) for line, seq_id, id, kind in stored}


def append(db: orm.Session, rows: Sequence[NewRow]) -> None:
    bulk_rows.insert(db, RequestRow, [_new_values(row) for row in rows])


def settle(db: orm.Session, settled: Iterable[NewOutcome]) -> None:
    bulk_rows.update(db, RequestRow, "number", [_settled_values(each) for each in settled])


def without_outcome(db: orm.Session, settled: Sequence[NewOutcome]) -> list[NewOutcome]:
    """Those of the outcomes that are not in the log yet."""
    keys = [(each.request.line, each.request.seq_id) for each in settled]
    rows = bulk_rows.find(db, RequestRow, ("line", "seq_id"), keys, ("number", "finished_at"))
    open_numbers = {number for number, finished_at in rows if finished_at is None}
    return [each for each in settled if each.request.number in open_numbers]


def unfinished(db: orm.Session) -> list[Request]:
    """The requests without an outcome, in the order of acceptance."""
    query = select(RequestRow).where(RequestRow.finished_at.is_(None)).order_by(RequestRow.number)
    return [_request(row) for row in db.scalars(query)]


async def given_up(db: AsyncSession) -> dict[str, str]:
    """The operator's reasons to fail unfinished requests, by id."""
    is_open = RequestRow.given_up.is_not(None), RequestRow.finished_at.is_(None)
    rows = await db.execute(select(RequestRow.id, RequestRow.given_up).where(*is_open))
    return {id: why or "" for id, why in rows}


async def history(db: AsyncSession, line: str, after: int) -> ModelHistory:
    """The history of a model's finished requests with a seq_id beyond ``after``; -1 for all."""
    query = (
        select(RequestRow)
        .where(RequestRow.line == line, RequestRow.seq_id > after, RequestRow.finished_at.is_not(None))
        .order_by(RequestRow.seq_id)
    )
    rows = (await db.scalars(query)).all()
    creation = await db.scalar(select(RequestRow).where(RequestRow.line == line, RequestRow.seq_id == 0))
    is_created = creation is None or creation.finished_at is not None
    history = ModelHistory([], set(), _broken(line, rows), is_created)
    for row in rows:
        if row.executed:
            history.executed.append(Executed(_request(row), row.digest, row.layout))
        else:
            history.closed.add(row.seq_id)
    if creation is None or (is_created and not creation.executed):
        error = creation and creation.error
        return history._replace(refusal=error or f"{line} was made by an earlier version of this server")
    return history


def _broken(line: str, rows: Sequence[RequestRow]) -> str | None:
    """Why a model cannot be restored; ``rows`` are its finished requests in order of seq_id.

    A request that the server or the operator has given up may still have had its effect: it had, if a request
    with a larger seq_id was executed before.
    """
    first_executed_behind = math.inf  # earliest time at which a request with a larger seq_id was executed
    for row in reversed(rows):
        finished_at = row.finished_at or 0.0
        if row.executed:
            if row.never_again is not None:
                return not_run_again(line, row.seq_id, by_operator(row.never_again))
            first_executed_behind = min(first_executed_behind, finished_at)
        elif row.kind in CHANGES_STATE and first_executed_behind < finished_at:
            if row.given_up is not None:
                return not_run_again(line, row.seq_id, by_operator(row.given_up))
            if row.category == "server":
                return not_run_again(line, row.seq_id, f"given up: {row.error}")
    return None


async def succeeded(db: AsyncSession, request_id: str, kind: RequestKind, session_id: str) -> Request | None:
    """The request with this id, if it is of this kind and session, and has a result."""
    if "\0" in request_id:  # PostgreSQL refuses to look for it
        return None
    row = await db.scalar(
        select(RequestRow).where(
            RequestRow.id == request_id,
            RequestRow.kind == kind,
            RequestRow.session_id == session_id,
            RequestRow.content_type.is_not(None),
        )
    )
    return None if row is None else _request(row)


def payload_of(row: RequestRow) -> BodyRef:
    return body_ref(row.payload_body, row.payload_file, row.payload_offset, row.payload_length)


def result_of(row: RequestRow) -> BodyRef | None:
    """The place of a result; None: there is none, or it is not kept any more."""
    if row.result_length is None:
        return None
    return body_ref(row.result_body, row.result_file, row.result_offset, row.result_length)


async def outcome(db: AsyncSession, request_id: str) -> Failed | tuple[str, BodyRef] | None:
    """The failure of a request, or the content type and place of its result. None: it is unfinished.

    Raises NotFound when the result is no longer kept.
    """
    row = await with_id(db, request_id)
    if row.finished_at is None:
        return None
    if row.content_type is None:
        return Failed(row.error or "", cast(Literal["user", "server"], row.category))
    result = result_of(row)
    if result is None:
        raise not_kept(request_id)
    return row.content_type, result


async def with_id(db: AsyncSession, request_id: str) -> RequestRow:
    """Return the row of a request. Raises NotFound."""
    row = await db.scalar(select(RequestRow).where(RequestRow.id == request_id))
    if row is None:
        raise not_kept(request_id)
    return row


def not_kept(request_id: str) -> NotFound:
    return NotFound(f"request {request_id!r} does not exist, or its result is no longer kept")


def body_ref(body: bytes | None, file: int | None, offset: int | None, length: int | None) -> BodyRef:
    """Say where a body is, as the columns of a row have it."""
    return BodyPlace(*cast(tuple[int, int, int], (file, offset, length))) if body is None else body


def body_values(name: str, body: BodyRef | None) -> dict[str, object]:
    """The four columns of a body; the length is null if there is no body."""
    if isinstance(body, bytes):
        values = body, None, None, len(body)
    else:
        values = None, *(body or (None, None, None))
    return {f"{name}_{column}": value for column, value in zip(BODY_COLUMNS, values, strict=True)}


def _request(row: RequestRow) -> Request:
    kind = cast(RequestKind, row.kind)
    return Request(row.number, row.id, kind, row.line, row.seq_id, row.session_id, row.base)


def _new_values(row: NewRow) -> Mapping[str, object]:
    """The values of all columns that have no default in the database."""
    request, refused = row.request, row.refused
    return {
        "number": request.number,
        "id": request.id,
        "kind": request.kind,
        "line": request.line,
        "seq_id": request.seq_id,
        "session_id": request.session_id,
        "base": request.base,
        "created_at": row.accepted_at,
        **body_values("payload", row.payload),
        "finished_at": None if refused is None else clock.now(),
        "error": None if refused is None else refused.error,
        "category": None if refused is None else refused.category,
        "executed": False,
        "losses": 0,
        "losses_by_command": 0,
        "coordinator_losses": 0,
    }


def _settled_values(settled: NewOutcome) -> Mapping[str, object]:
    outcome, result, times = settled.outcome, settled.result, settled.times
    is_failed = isinstance(outcome, Failed)
    return {
        "number": settled.request.number,
        "finished_at": settled.completion / MICROSECONDS,
        "content_type": None if is_failed else outcome.content_type,
        "error": outcome.error if is_failed else None,
        "category": outcome.category if is_failed else None,
        "executed": not is_failed or outcome.executed,
        "coordinator_losses": 0,  # a replay starts with a count of 0
        "digest": outcome.digest,
        "layout": outcome.layout,
        **body_values("result", result),
        "began_at": times.began_at,
        "sent_at": times.sent_at,
        "replied_at": times.replied_at,
        "tokens": None if is_failed else outcome.spent.tokens or None,
    }
