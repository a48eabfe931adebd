import json
import os
import time

import pytest
from sqlalchemy import func, select, update

from spmd_tx.coordinator.requests.records import Failed, Finished
from spmd_tx.coordinator.requests.traces import TraceExports
from spmd_tx.coordinator.retention import rules
from spmd_tx.coordinator.retention.reaper import Reaper
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage.tables import (
    AuditRow,
    Base,
    RequestRow,
    SessionRow,
    UsageRow,
)
from spmd_tx.errors import NotFound
from tests.coordinator.retention.contents import (
    HOUR,
    LIMITS,
    MODEL,
    add,
    add_model,
    add_request,
    add_session,
    add_snapshot,
    kept_seq_ids,
)


@pytest.mark.parametrize(
    "snapshots, kept",
    [
        ([], [0, 1, 2, 3, 4, 5]),
        ([3], [0, 1, 2, 3, 4, 5]),  # should it be damaged, all is run again
        ([2, 4], [0, 3, 4, 5]),  # should the second be damaged, the first is the start
        ([1, 2, 5], [0, 2, 3, 4, 5]),
    ],
)
async def test_requests_are_kept_as_long_as_a_replay_needs_them(database, tmp_path, reaper, snapshots, kept):
    await add_session(database)
    await add_model(database)
    for seq_id in range(6):
        await add_request(database, seq_id)
    for seq_id in snapshots:
        await add_snapshot(database, tmp_path, seq_id)
    await reaper.reap()
    assert await kept_seq_ids(database) == kept
    await reaper.reap()
    assert await kept_seq_ids(database) == kept


async def test_a_number_that_was_refused_is_kept_as_long_as_those_around_it(database, reaper):
    await add_session(database)
    await add_request(database, 1, executed=False, content_type=None, error="bad", category="user")
    await reaper.reap()
    assert await kept_seq_ids(database) == [1]


async def test_samples_are_not_replayed_and_go(database, reaper):
    await add_session(database)
    await add_request(database, 1, kind="sample", line="s:sample:0")
    await reaper.reap()
    assert await kept_seq_ids(database) == []


async def test_what_a_trace_tells_outlives_the_request(database, tmp_path, reaper, now):
    await add_session(database)
    times = {"created_at": now - 99 * HOUR, "began_at": 2.0, "sent_at": 3.0, "replied_at": 4.0}
    number = await add_request(
        database, 1, kind="sample", line="s:sample:0", finished_at=now - 98 * HOUR, tokens=7, **times
    )
    async with database.reading() as db:
        session = await db.get(SessionRow, "s")

    async def traced():
        export = await TraceExports(database, tmp_path).export(session)
        trace = json.loads(export.path.read_text())
        export.path.unlink()
        return [event["args"] for event in trace["traceEvents"] if "seq_id" in event.get("args", {})]

    whole = [{"seq_id": 1, "number": number, "tokens": 7}]
    assert await traced() == whole
    await reaper.reap(now)
    assert await kept_seq_ids(database) == []
    assert await traced() == whole
    await reaper.reap(now + rules.TRACES_KEPT_SECONDS)
    assert await traced() == []


async def test_traces_that_nobody_downloads_any_more_are_deleted(database, tmp_path, reaper):
    (tmp_path / "traces").mkdir()
    old, new = tmp_path / "traces" / "old", tmp_path / "traces" / "new"
    for path in (old, new):
        path.write_text("{}")
    os.utime(old, times=(0, time.time() - 3 * HOUR))
    await reaper.reap()
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["new"]


async def test_the_audit_log_and_usage_are_bounded(database, reaper, now):
    entry = {"event": "e", "actor": "a", "owner": "a", "details": {}}
    await add(database, AuditRow, *({**entry, "at": now - days * 24 * HOUR} for days in (1, 29, 31)))
    amounts = dict.fromkeys(("trained", "forwarded", "prompt", "cached", "sampled", "checkpoints"), 1)
    hour = int(now) // 3600 * 3600
    usage = {"line": "s:train:0", "session_id": "s", "owner": "a", **amounts}
    await add(database, UsageRow, *({**usage, "hour": hour - days * 24 * 3600} for days in (0, 399, 401)))
    await reaper.reap(now)
    async with database.reading() as db:
        assert await db.scalar(select(func.count()).select_from(AuditRow)) == 2
        assert await db.scalar(select(func.count()).select_from(UsageRow)) == 2


async def test_what_is_young_or_unfinished_stays(database, reaper, now):
    await add_session(database, ended_at=1.0)
    await add_request(database, 1, kind="sample", finished_at=now - HOUR)
    await add_request(database, 2, kind="sample", finished_at=None, result_file=None, content_type=None)
    await add_request(database, 3, kind="sample", finished_at=now - 3 * HOUR)
    await reaper.reap(now)
    assert await kept_seq_ids(database) == [1, 2]


async def test_a_session_that_has_ended_needs_no_replay_once_its_work_is_done(database, reaper):
    await add_session(database, ended_at=1.0)
    await add_request(database, 0)
    unfinished = await add_request(database, 1, finished_at=None)
    await reaper.reap()
    assert await kept_seq_ids(database) == [0, 1]
    async with database.transaction() as db:
        await db.execute(update(RequestRow).where(RequestRow.number == unfinished).values(finished_at=1.0))
    await reaper.reap()
    assert await kept_seq_ids(database) == []


async def test_time_without_a_server_does_not_count_for_open_sessions(database, tmp_path):
    await add_session(database, "s")
    await add_session(database, "ended", ended_at=1.0)
    await add_request(database, 1, kind="sample")
    await add_request(database, 2, kind="sample", session_id="ended")
    just_started = Reaper(database, tmp_path, LIMITS)
    await just_started.reap()
    assert await kept_seq_ids(database) == [1]
    await just_started.reap(clock.now() + 2 * HOUR + 1)
    assert await kept_seq_ids(database) == []


async def test_results_go_before_the_payloads_that_a_replay_needs(no_cache, queue, database, reaper, now):
    await add_session(database)
    request_id = await queue.submit("optim_step", MODEL, 1, "s", b"payload")
    failed = await queue.submit("optim_step", MODEL, 2, "s", b"payload")
    queue.resolve(request_id, Finished("x", b"result"))
    queue.resolve(failed, Failed("bad", "user"))
    await queue.flush()
    await reaper.reap(now + 3 * HOUR)
    with pytest.raises(NotFound, match="no longer kept"):
        await queue.wait(request_id, timeout=0)
    assert await queue.wait(failed, timeout=0) == Failed("bad", "user")
    (executed,) = (await queue.history(MODEL, after=-1)).executed
    assert executed.digest == Finished("x", b"result").digest
    assert await queue.payload(executed.request) == b"payload"


async def test_a_models_creation_is_known_until_its_session_ends(no_cache, queue, database, reaper, now):
    await add_session(database)
    created = await queue.submit("create_model", MODEL, 0, "s", b"{}")
    queue.resolve(created, Finished("x", b"y"))
    await queue.flush()
    await reaper.reap(now + 3 * HOUR)
    assert await queue.submit("create_model", MODEL, 0, "s", b"{}") == created
    async with database.transaction() as db:
        await db.execute(update(SessionRow).values(ended_at=1.0))
    await reaper.reap(now + 3 * HOUR)
    with pytest.raises(NotFound):
        await queue.wait(created, timeout=0)


async def test_a_dry_run_tells_what_would_go_and_changes_nothing(database, tmp_path, reaper, payload_files):
    await add_session(database, ended_at=1.0)
    await add_model(database)
    await add_request(database, 1, payload_file=1, result_file=1)
    await add_snapshot(database, tmp_path, 1)

    async def everything():
        files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
        async with database.reading() as db:
            rows = [
                (table.name, len((await db.execute(select(table))).all()))
                for table in Base.metadata.sorted_tables
            ]
        return sorted(files - {"spmd_tx.db-wal", "spmd_tx.db-shm"}), rows

    before = await everything()
    foretold = await reaper.reap(at_rest=True, dry_run=True)
    assert await everything() == before
    assert await reaper.reap(at_rest=True) == foretold
    assert {(each.kind, each.count) for each in foretold} == {
        ("finished requests", 1),
        ("payload files", 4),
        ("snapshots", 1),
    }
    assert await reaper.reap(at_rest=True) == []
