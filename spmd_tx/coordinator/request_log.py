"""Requests and outcomes as rows. Plain functions over a transaction; request_queue.py decides when."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from sqlalchemy import and_, delete, func, insert, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.payloads import Place
from spmd_tx.coordinator.tables import RequestRow, Session
from spmd_tx.errors import NotFound

KEYS_PER_QUERY = 1000

Key = tuple[str, int]  # line, seq_id

Kind = Literal[
    "create_model",
    "load_weights",
    "forward_backward",
    "forward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "sample",
]


@dataclass(frozen=True)
class Request:
    """A request that was accepted and will be answered."""

    number: int  # order of acceptance
    id: str  # request_id on the wire; unguessable
    kind: Kind
    line: str  # the model's id; for samples the sampler's
    seq_id: int  # place in the line; 0 is the model's creation
    session_id: str


@dataclass(frozen=True)
class Finished:
    """The result, encoded as the client wants it."""

    content_type: str
    body: bytes


@dataclass(frozen=True)
class Failed:
    """Why there will be no result, and whose fault it is."""

    error: str
    category: Literal["user", "server"]


Outcome = Finished | Failed


class Known(NamedTuple):
    """What is already in the log under a key."""

    id: str
    kind: str


class NewRow(NamedTuple):
    """A request to be written down, with its outcome when it is refused."""

    request: Request
    payload: Place
    refused: Failed | None


class Settled(NamedTuple):
    """An outcome to be written down; ``result`` is where the body of a finished one is."""

    number: int
    outcome: Outcome
    result: Place | None


async def next_number(db: AsyncSession) -> int:
    return (await db.scalar(select(func.max(RequestRow.number))) or 0) + 1


async def known(db: AsyncSession, keys: Iterable[Key]) -> dict[Key, Known]:
    """Which of these keys are in the log."""
    found: dict[Key, Known] = {}
    all_keys = list(keys)
    columns = (RequestRow.line, RequestRow.seq_id, RequestRow.id, RequestRow.kind)
    for start in range(0, len(all_keys), KEYS_PER_QUERY):
        some_keys = all_keys[start : start + KEYS_PER_QUERY]
        query = select(*columns).where(tuple_(RequestRow.line, RequestRow.seq_id).in_(some_keys))
        found |= {(line, seq_id): Known(id, kind) for line, seq_id, id, kind in await db.execute(query)}
    return found


async def append(db: AsyncSession, rows: Sequence[NewRow]) -> None:
    if rows:
        await db.execute(insert(RequestRow), [_new_values(row) for row in rows])


async def settle(db: AsyncSession, settled: Iterable[Settled]) -> None:
    values = [_settled_values(each) for each in settled]
    if values:
        await db.execute(update(RequestRow), values)


async def fail_unfinished(db: AsyncSession, failure: Failed) -> None:
    """Settle every request that an earlier run of the server left behind."""
    values = {"finished_at": time.time(), "error": failure.error, "category": failure.category}
    await db.execute(update(RequestRow).where(RequestRow.finished_at.is_(None)).values(values))


async def payload_place(db: AsyncSession, request_id: str) -> Place:
    row = await _row(db, request_id)
    return Place(row.payload_file, row.payload_offset, row.payload_length)


async def outcome(db: AsyncSession, request_id: str) -> Failed | tuple[str, Place]:
    """How a settled request ended: why it failed, or its content type and where its result is."""
    row = await _row(db, request_id)
    if row.content_type is None:
        return Failed(row.error or "", cast(Literal["user", "server"], row.category))
    place = row.result_file, row.result_offset, row.result_length
    return row.content_type, Place(*cast(tuple[int, int, int], place))


async def delete_finished(db: AsyncSession, before: float) -> set[int]:
    """Delete what was finished before a time; return the numbers of the files still referred to.

    As long as a session is open the creations of its models stay, so that a late duplicate is known as one.
    """
    is_open = RequestRow.session_id.in_(select(Session.id).where(Session.ended_at.is_(None)))
    is_creation = and_(RequestRow.seq_id == 0, RequestRow.kind != "sample")
    is_kept = and_(is_open, is_creation)
    await db.execute(delete(RequestRow).where(RequestRow.finished_at < before, ~is_kept))
    payloads = await db.scalars(select(RequestRow.payload_file).distinct())
    results = await db.scalars(select(RequestRow.result_file).distinct())
    return {number for number in (*payloads, *results) if number is not None}


async def _row(db: AsyncSession, request_id: str) -> RequestRow:
    row = await db.scalar(select(RequestRow).where(RequestRow.id == request_id))
    if row is None:
        raise NotFound(f"request {request_id!r} does not exist, or its result is no longer kept")
    return row


def _new_values(row: NewRow) -> Mapping[str, object]:
    request, refused = row.request, row.refused
    now = time.time()
    return {
        "number": request.number,
        "id": request.id,
        "kind": request.kind,
        "line": request.line,
        "seq_id": request.seq_id,
        "session_id": request.session_id,
        "created_at": now,
        "payload_file": row.payload.file,
        "payload_offset": row.payload.offset,
        "payload_length": row.payload.length,
        "finished_at": None if refused is None else now,
        "error": None if refused is None else refused.error,
        "category": None if refused is None else refused.category,
    }


def _settled_values(settled: Settled) -> Mapping[str, object]:
    outcome, result = settled.outcome, settled.result
    is_failed = isinstance(outcome, Failed)
    return {
        "number": settled.number,
        "finished_at": time.time(),
        "content_type": None if is_failed else outcome.content_type,
        "error": outcome.error if is_failed else None,
        "category": outcome.category if is_failed else None,
        "result_file": result and result.file,
        "result_offset": result and result.offset,
        "result_length": result and result.length,
    }
