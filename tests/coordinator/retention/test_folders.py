import os
import time

import pytest
from sqlalchemy import func, select

from spmd_tx.coordinator.retention.reaper import Reaper
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.runtime.folder_names import folder_name
from spmd_tx.coordinator.storage.tables import (
    SnapshotRow,
)
from tests.coordinator.retention.contents import (
    HOUR,
    LIMITS,
    MODEL,
    add_model,
    add_note,
    add_request,
    add_sampler,
    add_session,
    add_snapshot,
    version_folder,
)


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


async def test_an_unnamed_version_stays_with_the_sampler_of_its_save(database, tmp_path, reaper, now):
    await add_session(database, "s")
    sampler = await add_sampler(database, 0, now, model_id="s:train:0", version="the save's request")
    folder = version_folder(tmp_path, sampler)
    await reaper.reap(at_rest=True)
    assert folder.exists()


async def test_superseded_versions_that_nobody_uses_are_given_up(database, tmp_path, reaper, now):
    await add_session(database)
    retired = []
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
    await reaper.reap(now, retire=retired.extend)
    assert retired == [ids[0]]
    assert all(folder.exists() for folder in folders)  # workers may still read them
    await reaper.reap(now, at_rest=True)
    assert [folder.exists() for folder in folders] == [False, True, True, True]


@pytest.mark.parametrize("place", ["compilation_cache", "groups/rollouts/compilation_cache"])
async def test_the_compilation_cache_loses_what_was_unused_for_longest(database, tmp_path, reaper, place):
    cache = tmp_path / place
    cache.mkdir(parents=True)
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
