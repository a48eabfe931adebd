"""The log of a server that is measured: filled before it starts, and looked at afterwards."""

import time
from pathlib import Path

from sqlalchemy import insert, select

from spmd_tx.coordinator.storage.database import open_beside, open_database
from spmd_tx.coordinator.storage.tables import ModelRow, RequestRow, SamplerRow, SessionRow

REQUESTS_PER_SESSION = 1000
ROWS_AT_ONCE = 20_000


async def fill(data_dir: Path, url: str | None, count: int) -> None:
    """Finished requests of sessions that have ended just now; half of them samples."""
    database = await open_database(url, data_dir)
    now = time.time()
    sessions = range(-(-count // REQUESTS_PER_SESSION))
    async with database.transaction() as db:
        await db.execute(insert(SessionRow), [_session(number, now) for number in sessions])
        await db.execute(insert(ModelRow), [_model(number, now) for number in sessions])
        await db.execute(insert(SamplerRow), [_sampler(number, now) for number in sessions])
    for start in range(0, count, ROWS_AT_ONCE):
        async with database.transaction() as db:
            rows = [_request(number, now) for number in range(start, min(count, start + ROWS_AT_ONCE))]
            await db.execute(insert(RequestRow), rows)
    await database.close()


async def wake_ups(data_dir: Path, url: str | None, last: int) -> list[float]:
    """Milliseconds from a request's arrival to the sending of its command, of the last ones."""
    database = await open_beside(url, data_dir)
    query = select(RequestRow.created_at, RequestRow.sent_at).where(RequestRow.sent_at.is_not(None))
    async with database.reading() as db:
        found = (await db.execute(query.order_by(RequestRow.number.desc()).limit(last))).all()
    await database.close()
    return [1e3 * (sent_at - created_at) for created_at, sent_at in found if sent_at is not None]


def _session(number: int, now: float) -> dict[str, object]:
    return {
        "id": f"session-{number}",
        "created_at": now - 3600,
        "ended_at": now - 60,
        "ended_because": "its client finished: success",
        "tags": [],
    }


def _model(number: int, now: float) -> dict[str, object]:
    return {
        "id": f"session-{number}:train:0",
        "session_id": f"session-{number}",
        "base_model": "tiny",
        "rank": 4,
        "alpha": 32.0,
        "train_attn": True,
        "train_mlp": True,
        "train_unembed": True,
        "created_at": now - 3600,
    }


def _sampler(number: int, now: float) -> dict[str, object]:
    return {
        "id": f"session-{number}:sample:0",
        "session_id": f"session-{number}",
        "base_model": "tiny",
        "created_at": now - 3600,
    }


def _request(number: int, now: float) -> dict[str, object]:
    session, place = divmod(number, REQUESTS_PER_SESSION)
    is_sample, seq_id = bool(place % 2), place // 2
    at = now - 3600 + number * 1e-3
    kind = "sample" if is_sample else ("forward" if seq_id else "create_model")
    return {
        "number": number + 1,
        "id": f"{number:032x}",
        "kind": kind,
        "line": f"session-{session}:{'sample' if is_sample else 'train'}:0",
        "seq_id": seq_id,
        "session_id": f"session-{session}",
        "created_at": at,
        **_body("payload", number),
        "finished_at": at + 0.01,
        "content_type": "application/json",
        **_body("result", number),
        "executed": True,
        "began_at": at,
        "sent_at": at,
        "replied_at": at,
        "tokens": 10,
    }


def _body(name: str, number: int) -> dict[str, object]:
    """Every second one in its row, the others in files."""
    body, file, offset = (bytes(100), None, None) if number % 2 else (None, number // 8, 0)
    return {f"{name}_body": body, f"{name}_file": file, f"{name}_offset": offset, f"{name}_length": 100}
