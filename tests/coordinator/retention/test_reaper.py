import json
import os
import time
from itertools import count

import pytest
from sqlalchemy import func, insert, select, update

from spmd_tx.coordinator.checkpoints.snapshots import Snapshots
from spmd_tx.coordinator.requests import payload_files as payloads
from spmd_tx.coordinator.requests.payload_files import PayloadFiles
from spmd_tx.coordinator.requests.records import Failed, Finished
from spmd_tx.coordinator.requests.traces import TraceExports
from spmd_tx.coordinator.retention import rules
from spmd_tx.coordinator.retention.reaper import Limits, Reaper
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.runtime.folder_names import folder_name
from spmd_tx.coordinator.storage.disk import by_kind
from spmd_tx.coordinator.storage.folders import write_manifest
from spmd_tx.coordinator.storage.tables import (
    AuditRow,
    Base,
    Model,
    RequestRow,
    Sampler,
    Session,
    SnapshotRow,
    UsageRow,
)
from spmd_tx.errors import NotFound

HOUR = 3600.0
MODEL = "s:train:0"
LIMITS = Limits(results=2 * HOUR, versions=HOUR, audit=30 * 24 * HOUR, compilation_cache=1000)


@pytest.fixture
async def reaper(database, tmp_path):
    """Of a server that has run for a day."""
    reaper = Reaper(database, tmp_path, LIMITS)
    reaper._started_at -= 24 * HOUR
    return reaper


@pytest.fixture
def now():
    return clock.now()


async def add(database, table, *rows):
    async with database.transaction() as db:
        for row in rows:
            await db.execute(insert(table).values(row))


async def add_session(database, id="s", ended_at=None):
    await add(database, Session, {"id": id, "created_at": 0.0, "tags": [], "ended_at": ended_at})


async def add_model(database, id=MODEL, session_id="s"):
    adapter = {"rank": 4, "alpha": 32.0, "train_attn": True, "train_mlp": True, "train_unembed": True}
    row = {"id": id, "session_id": session_id, "base_model": "b", "created_at": 0.0}
    await add(database, Model, row | adapter)


async def add_snapshot(database, data_dir, seq_id, model_id=MODEL):
    folder = data_dir / "snapshots" / folder_name(model_id) / str(seq_id)
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"w" * 100)
    row = {"model_id": model_id, "seq_id": seq_id, "path": str(folder), "optimizer": True, "adapter": {}}
    await add(database, SnapshotRow, row | {"created_at": 0.0, "size_bytes": 100})
    return folder


numbers = count(1)


async def add_request(database, seq_id, *, kind="optim_step", line=MODEL, session_id="s", **values):
    """A finished one of long ago, unless values say otherwise."""
    number = next(numbers)
    row = {
        "number": number, "id": f"r{number}", "kind": kind, "line": line, "seq_id": seq_id, "executed": True,
        "session_id": session_id, "created_at": 0.0, "finished_at": 1.0, "losses": 0, "losses_by_command": 0,
        "payload_file": number, "payload_offset": 0, "payload_length": 10, "content_type": "x",
        "result_file": number, "result_offset": 10, "result_length": 5,
    }  # fmt: skip
    await add(database, RequestRow, row | values)
    return number


async def kept_seq_ids(database):
    async with database.reading() as db:
        return sorted(await db.scalars(select(RequestRow.seq_id)))


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
        session = await db.get(Session, "s")

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
        await db.execute(update(Session).values(ended_at=1.0))
    await reaper.reap(now + 3 * HOUR)
    with pytest.raises(NotFound):
        await queue.wait(created, timeout=0)


@pytest.fixture
def payload_files(tmp_path, monkeypatch, all_in_files):
    """Files 0 to 3."""
    monkeypatch.setattr(payloads, "SEGMENT_BYTES", 1)
    files = PayloadFiles(tmp_path / "payloads")
    for _ in range(4):
        files.write([b"body"])
    yield files
    files.close()


async def test_payload_files_go_when_no_row_has_referred_to_them_for_a_while(
    database, tmp_path, payload_files
):
    reaper = Reaper(database, tmp_path, LIMITS, pending=lambda: {3})
    await add_request(database, 1, payload_file=1, result_file=2, finished_at=clock.now())
    await reaper.reap()
    assert payload_files.numbers() == [0, 1, 2, 3]
    await reaper.reap()
    assert payload_files.numbers() == [1, 2, 3]


async def test_files_stay_that_rows_of_higher_numbers_refer_to(database, tmp_path, reaper, payload_files):
    """Rows and files are counted apart: many rows refer to each file."""
    for seq_id, file in enumerate((1, 1, 1, 1, 2, 2, 3)):
        await add_request(database, seq_id, payload_file=file, result_file=file, finished_at=clock.now())
    await reaper.reap(at_rest=True)
    assert payload_files.numbers() == [1, 2, 3]


async def test_without_a_server_what_a_crash_left_goes_at_once(database, tmp_path, reaper, payload_files):
    (tmp_path / "scratch" / "old").mkdir(parents=True)
    (tmp_path / "payloads" / "000000000009.tmp").write_bytes(b"half")
    orphan = tmp_path / "snapshots" / "model" / "3"
    orphan.mkdir(parents=True)
    await reaper.reap(at_rest=True)
    assert payload_files.numbers() == []
    assert not (tmp_path / "scratch").exists()
    assert not orphan.exists()
    assert [path.name for path in (tmp_path / "payloads").iterdir()] == ["lock"]


async def test_snapshots_stay_with_their_model(database, tmp_path, reaper):
    await add_session(database, "s")
    await add_session(database, "ended", ended_at=1.0)
    await add_model(database)
    await add_model(database, "ended:train:0", "ended")
    kept = [await add_snapshot(database, tmp_path, seq_id) for seq_id in (2, 4)]
    ended = await add_snapshot(database, tmp_path, 3, "ended:train:0")
    being_written = tmp_path / "snapshots" / folder_name(MODEL) / "6"
    being_written.mkdir()
    left_by_a_crash = tmp_path / "snapshots" / folder_name(MODEL) / "5"
    left_by_a_crash.mkdir()
    for old in (ended, left_by_a_crash, *kept):
        os.utime(old, (1, 1))
    await reaper.reap()
    assert all(folder.exists() for folder in (*kept, being_written))
    assert not ended.exists()
    assert not left_by_a_crash.exists()
    async with database.reading() as db:
        assert await db.scalar(select(func.count()).select_from(SnapshotRow)) == 2


async def add_sampler(database, number, created_at, session_id="s", **values):
    id = f"{session_id}:sample:{number}"
    row = {"id": id, "session_id": session_id, "base_model": "b", "created_at": created_at}
    await add(database, Sampler, row | values)
    return id


def version_folder(data_dir, version):
    folder = data_dir / "versions" / folder_name(version)
    folder.mkdir(parents=True)
    (folder / "adapter.safetensors").write_bytes(b"w" * 50)
    os.utime(folder, (1, 1))
    return folder


async def test_versions_go_with_the_last_session_that_uses_them(database, tmp_path, reaper, now):
    await add_session(database, "s")
    await add_session(database, "ended", ended_at=1.0)
    shared = "tinker://run/sampler_weights/name#1.0"
    own = await add_sampler(database, 0, now, model_id=MODEL)
    await add_sampler(database, 1, now, model_path="tinker://run/sampler_weights/name", version=shared)
    gone = await add_sampler(database, 0, now, "ended", model_id="ended:train:0")
    await add_sampler(database, 1, now, "ended", version=shared)
    kept = [version_folder(tmp_path, version) for version in (own, shared)]
    ended = version_folder(tmp_path, gone)
    await reaper.reap()
    assert all(folder.exists() for folder in kept)
    assert not ended.exists()


def add_note(data_dir, kind, name, used_at, session="s"):
    path = data_dir / kind / session / f"{name}.zst"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"n" * 10)
    os.utime(path, (used_at, used_at))
    os.utime(path.parent, (0, 0))
    return path


async def test_notes_of_samples_go_with_their_session(database, tmp_path, reaper, now):
    await add_session(database)
    await add_session(database, id="ended", ended_at=0.0)
    kinds = ("routing", "stability")
    kept = [add_note(tmp_path, kind, "r", now) for kind in kinds]
    gone = [add_note(tmp_path, kind, "r", now, session="ended") for kind in kinds]
    await reaper.reap()
    assert all(path.exists() for path in kept)
    assert not any(path.parent.exists() for path in gone)


@pytest.mark.parametrize("kind", ["forward_backward", "forward"])
async def test_what_stability_needs_goes_a_day_after_its_last_use_unless_a_replay_needs_it(
    database, tmp_path, reaper, now, kind
):
    await add_session(database)
    await add_model(database)
    trained_at = now - 72 * HOUR
    await add_request(database, 1, kind=kind, created_at=trained_at)
    ages = {"young": 23, "old": 70, "older": 76}
    notes = {name: add_note(tmp_path, "stability", name, now - age * HOUR) for name, age in ages.items()}
    routing = add_note(tmp_path, "routing", "r", 0.0)
    await reaper.reap()
    left = {name for name, path in notes.items() if path.exists()}
    assert left == ({"young", "old"} if kind == "forward_backward" else {"young"})
    assert routing.exists()
    for seq_id in (2, 3):
        await add_snapshot(database, tmp_path, seq_id)
    await reaper.reap()
    assert {name for name, path in notes.items() if path.exists()} == {"young"}


async def test_superseded_versions_that_nobody_uses_are_given_up(database, tmp_path, reaper, now):
    await add_session(database)
    retired = []
    reaper.retire = retired.extend
    ids = [
        await add_sampler(database, number, now - 3 * HOUR + number, model_id=MODEL) for number in range(4)
    ]
    await add_sampler(database, 9, now - 3 * HOUR, model_id="s:train:1")  # the newest of its model
    await add_request(database, 1, kind="sample", line=ids[1], created_at=now - 60, finished_at=now)
    await add_request(database, 1, kind="sample", line=ids[2], created_at=1.0, finished_at=None)
    for number in (7, 8):  # they have no versions of their own, but that of their model
        await add_sampler(database, number, now - 3 * HOUR - number, model_id="s:train:2", inflight=True)
    folders = [version_folder(tmp_path, id) for id in ids]
    await Reaper(database, tmp_path, LIMITS).reap(now, at_rest=True)
    assert all(folder.exists() for folder in folders)  # time without a server does not count
    await reaper.reap(now)
    assert retired == [ids[0]]
    assert all(folder.exists() for folder in folders)  # workers may still read them
    await reaper.reap(now, at_rest=True)
    assert [folder.exists() for folder in folders] == [False, True, True, True]


async def test_the_compilation_cache_loses_what_was_unused_for_longest(database, tmp_path, reaper):
    cache = tmp_path / "compilation_cache"
    cache.mkdir()
    for age, name in enumerate(("newest", "second", "third", "oldest")):
        for suffix, size in (("-cache", 400), ("-atime", 8)):
            path = cache / f"{name}{suffix}"
            path.write_bytes(b"x" * size)
            os.utime(path, (time.time() - 60 * age,) * 2)
    await reaper.reap()
    assert sorted(path.name for path in cache.iterdir()) == [
        "newest-atime",
        "newest-cache",
        "second-atime",
        "second-cache",
    ]


async def test_what_cannot_be_deleted_is_told_and_does_not_stop_the_rest(
    database, tmp_path, reaper, payload_files, monkeypatch, caplog
):
    unlink = type(tmp_path).unlink

    def unlink_most(path, missing_ok=False):
        if path.name == "000000000001.zst":
            raise PermissionError(13, "Permission denied")
        unlink(path, missing_ok)

    monkeypatch.setattr(type(tmp_path), "unlink", unlink_most)
    await reaper.reap(at_rest=True)
    assert payload_files.numbers() == [1]
    assert "000000000001.zst: [Errno 13]" in caplog.text


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


def test_disk_use_is_told_by_kind(tmp_path):
    for name, size in (("payloads/1.zst", 10), ("versions/a/b/c", 20), ("spmd_tx.db-wal", 30), ("new/x", 40)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    found = by_kind(tmp_path)
    assert {kind: size for kind, size in found.items() if size} == {
        "payloads": 10,
        "versions": 20,
        "database": 30,
        "other": 40,
    }
    assert "snapshots" in found


async def test_the_snapshot_of_a_load_that_failed_is_not_started_from(database, tmp_path):
    """What it links is complete before the load is: it is what would have been."""
    for seq_id in (3, 5):
        folder = await add_snapshot(database, tmp_path, seq_id)
        write_manifest(folder, tmp_path)
    await add_request(database, 3)
    await add_request(database, 5, kind="load_weights", executed=False, content_type=None, category="server")
    snapshots = Snapshots(database, tmp_path / "snapshots", 60.0, time.monotonic)
    adapter = {"rank": 4, "alpha": 32.0, "train_attn": True, "train_mlp": True, "train_unembed": True}
    async with database.transaction() as db:
        await db.execute(update(SnapshotRow).values(adapter=adapter))
    found, problem = await snapshots.newest(MODEL, before=None)
    assert problem is None
    assert found.seq_id == 3
