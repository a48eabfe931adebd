from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import delete, select, update

from spmd_tx.coordinator.storage.tables import CheckpointRow, ModelRow, SessionRow, StoredCheckpoint, UsageRow
from spmd_tx.coordinator.tenancy import stored_checkpoints, usage_report
from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.coordinator.tenancy.usage_report import GIGABYTE, EventPage, window
from spmd_tx.errors import InvalidRequest

ALICE = Caller("alice", "user")
START = datetime(2026, 5, 1, tzinfo=UTC)
HOUR = 3600.0


def at(hours: float) -> float:
    return START.timestamp() + hours * HOUR


async def save(database, name: str, hours: float, size: int, owner: str = "alice") -> None:
    async with database.transaction() as db:
        row = CheckpointRow(
            run_id="r", kind="weights", name=name, size_bytes=size, created_at=at(hours), owner=owner
        )
        db.add(row)


async def look(database, hours: float) -> None:
    async with database.transaction() as db:
        await stored_checkpoints.look(db, at(hours))


async def gigabyte_hours(database, now: float, caller: Caller = ALICE) -> dict[int, float]:
    """By hours since START, of one day."""
    wanted = window(START.isoformat(), (START + timedelta(days=1)).isoformat())
    async with database.reading() as db:
        report = await usage_report.usage(db, wanted, caller, at(now))
    found: dict[int, float] = {}
    for event in report.data:
        hour = round((event.bucket_start - START).total_seconds() / HOUR)
        found[hour] = found.get(hour, 0.0) + event.event_info.gigabyte_hours
    return found


async def test_a_checkpoint_counts_for_as_long_as_it_is_there(database):
    await save(database, "a", 0.5, int(2 * GIGABYTE))
    await look(database, 0.6)
    assert await gigabyte_hours(database, now=2.25) == pytest.approx({0: 1.0, 1: 2.0, 2: 0.5})
    async with database.transaction() as db:
        await db.execute(delete(CheckpointRow))
    await look(database, 3.5)
    assert await gigabyte_hours(database, now=20) == pytest.approx({0: 1.0, 1: 2.0, 2: 2.0, 3: 1.0})


async def test_looking_again_changes_nothing(database):
    await save(database, "a", 0, int(GIGABYTE))
    for hours in (1, 2, 3):
        await look(database, hours)
    assert await gigabyte_hours(database, now=2) == pytest.approx({0: 1.0, 1: 1.0})


async def test_one_that_is_overwritten_counts_up_to_then(database):
    await save(database, "a", 0, int(GIGABYTE))
    await look(database, 0.5)
    async with database.transaction() as db:
        await db.execute(update(CheckpointRow).values(created_at=at(1), size_bytes=int(3 * GIGABYTE)))
    await look(database, 1)
    assert await gigabyte_hours(database, now=2) == pytest.approx({0: 1.0, 1: 3.0})


async def test_usage_before_the_window_is_not_in_it(database):
    await save(database, "a", -10, int(GIGABYTE))
    await save(database, "gone", -20, int(GIGABYTE))
    await look(database, -5)
    async with database.transaction() as db:
        await db.execute(delete(CheckpointRow).where(CheckpointRow.name == "gone"))
    await look(database, -4)
    assert await gigabyte_hours(database, now=1) == pytest.approx({0: 1.0})


async def test_storage_of_others_is_seen_by_admins_only(database):
    await save(database, "a", 0, int(GIGABYTE), owner="bob")
    await look(database, 0)
    assert await gigabyte_hours(database, now=1) == {}
    assert await gigabyte_hours(database, now=1, caller=Caller("root", "admin")) == {0: 1.0}


async def test_what_was_deleted_long_ago_is_forgotten(database):
    await save(database, "a", 0, 1)
    await look(database, 0)
    async with database.transaction() as db:
        await db.execute(delete(CheckpointRow))
    await look(database, 1)
    async with database.transaction() as db:
        await stored_checkpoints.forget(db, at(300 * 24))
        assert len((await db.scalars(select(StoredCheckpoint))).all()) == 1
        await stored_checkpoints.forget(db, at(500 * 24))
        assert (await db.scalars(select(StoredCheckpoint))).all() == []


@pytest.mark.parametrize(
    "start, end, complaint",
    [
        (START + timedelta(minutes=1), START + timedelta(days=1), "full hour"),
        (START, START + timedelta(hours=1.5), "full hour"),
        (START.replace(tzinfo=None), START + timedelta(days=1), "offset from UTC"),
        (START, START, "14 days"),
        (START, START + timedelta(days=15), "14 days"),
        (START + timedelta(days=200_000), START + timedelta(days=200_001), "future"),
    ],
)
def test_a_window_is_whole_hours_and_up_to_fourteen_days(start, end, complaint):
    with pytest.raises(InvalidRequest, match=complaint):
        window(start.isoformat(), end.isoformat())


@pytest.fixture
async def much(database):
    """Six hours of four samplers in two sessions with long metadata, and two checkpoints."""
    async with database.transaction() as db:
        for session in "st":
            about = {
                "created_at": at(0),
                "tags": [],
                "owner": "alice",
                "user_metadata": {"notes": "x" * 1000},
            }
            db.add(SessionRow(id=session, **about))
        for number in range(24):
            line, session = f"sampler {number % 4}", "st"[number % 2]
            amounts = dict.fromkeys(("trained", "forwarded", "prompt", "cached", "checkpoints"), 0)
            row = {"hour": int(at(number // 4)), "line": line, "session_id": session, "owner": "alice"}
            db.add(UsageRow(**row, **amounts, sampled=number + 1))
    for name in "ab":
        await save(database, name, 0, int(GIGABYTE))
    await look(database, 0)


async def usage_of(database, page):
    wanted = window(START.isoformat(), (START + timedelta(days=1)).isoformat())
    async with database.reading() as db:
        return await usage_report.usage(db, wanted, ALICE, at(6), page)


async def test_usage_is_read_in_pages_and_all_of_it_is_in_one(database, much):
    whole = await usage_of(database, EventPage())
    assert len(whole.data) == 24 + 2 * 6
    found, metadata, offset, pages = [], {}, 0, 0
    while offset is not None:
        page = await usage_of(database, EventPage(offset, 3000))
        assert 0 < len(page.data) < 10
        assert {event.session_id for event in page.data} - {None} == page.sessions.keys()
        found, metadata, offset = found + page.data, metadata | page.sessions, page.next_offset
        pages += 1
    assert pages > 3
    assert sorted(map(repr, found)) == sorted(map(repr, whole.data))
    assert metadata == whole.sessions
    order = [(event.bucket_start, -getattr(event.event_info, "token_count", 0)) for event in whole.data]
    assert order == sorted(order)


async def test_usage_that_is_too_much_for_an_answer_is_refused_with_the_remedy(database, much):
    with pytest.raises(InvalidRequest, match="ask for fewer hours at a time, or send offset=0") as refused:
        await usage_of(database, EventPage(None, 1000))
    assert "3.9 KiB" in str(refused.value)


async def test_the_storage_of_too_many_projects_is_refused_with_the_remedy(database):
    async with database.transaction() as db:
        for number in range(3):
            run, about = f"s{number}:train:0", {"created_at": at(0), "base_model": "x", "owner": "alice"}
            db.add(
                SessionRow(id=f"s{number}", tags=[], owner="alice", created_at=at(0), project_id=f"p{number}")
            )
            shape = {"rank": 8, "alpha": 8.0, "train_attn": True, "train_mlp": True, "train_unembed": True}
            db.add(ModelRow(id=run, session_id=f"s{number}", created_at=at(0), base_model="x", **shape))
            db.add(CheckpointRow(run_id=run, kind="weights", name="a", size_bytes=7, **about))
    async with database.reading() as db:
        whole = await usage_report.current_storage(db, None, ALICE)
        one = await usage_report.current_storage(db, "p1", ALICE, most_bytes=1)
        with pytest.raises(InvalidRequest, match="ask for one of them with project_id"):
            await usage_report.current_storage(db, None, ALICE, most_bytes=1)
    assert sorted(item.project_id for item in whole.data) == ["p0", "p1", "p2"]
    assert [(item.project_id, item.size_bytes) for item in one.data] == [("p1", 7)]
