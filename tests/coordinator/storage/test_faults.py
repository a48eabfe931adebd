"""Disk and database fail under a queue and under the routes, and come back."""

import asyncio
import errno
import re
from contextlib import asynccontextmanager

import pytest
import zstandard
from sqlalchemy import func, select
from sqlalchemy.exc import SQLAlchemyError

from spmd_tx.coordinator.requests import rows
from spmd_tx.coordinator.requests.payload_files import PayloadFiles
from spmd_tx.coordinator.requests.queue import open_queue
from spmd_tx.coordinator.requests.records import Failed, Finished
from spmd_tx.coordinator.server import housekeeping
from spmd_tx.coordinator.storage import disk
from spmd_tx.coordinator.storage.database import open_database
from spmd_tx.coordinator.storage.disk import DiskGuard
from spmd_tx.coordinator.storage.tables import RequestRow
from spmd_tx.errors import Abandoned, DamagedBody, StartError, Unavailable
from tests.support.disks import fill, make_read_only

RESULT = Finished("application/json", b"x" * 50_000)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(disk, "LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(disk, "SHORTEST_PAUSE", 0.05)


async def submit(queue, seq_id=1, payload=b"{}"):
    return await queue.submit("optim_step", "s:train:0", seq_id, "s", payload)


async def submit_until_it_is_stored(queue, **request):
    """As the SDK does."""
    while True:
        try:
            return await submit(queue, **request)
        except Unavailable:
            await asyncio.sleep(0.02)


@asynccontextmanager
async def queue_on(database_url, data_dir, storage=None):
    database = await open_database(database_url, data_dir)
    async with queue_on_database(database, data_dir, storage) as queue:
        yield queue
    await database.close()


@asynccontextmanager
async def queue_on_database(database, data_dir, storage=None):
    queue = await open_queue(database, data_dir, storage)
    writer = asyncio.create_task(queue.run(lambda request: None))
    yield queue
    writer.cancel()
    await asyncio.wait([writer])
    queue.close()


class UnsureDatabase:
    """A database whose next commits happen, but seem to fail."""

    def __init__(self, database):
        self._database = database
        self.unsure_commits = 0

    async def write(self, work):
        written = await self._database.write(work)
        if self.unsure_commits:
            self.unsure_commits -= 1
            raise ConnectionError("the connection was lost while the commit was confirmed")
        return written

    def reading(self):
        return self._database.reading()


async def test_a_request_whose_commit_seemed_to_fail_is_carried_out_once(running_queue, database, tmp_path):
    unsure = UnsureDatabase(database)
    arrived = []
    async with running_queue(unsure, tmp_path, arrived.append) as queue:
        unsure.unsure_commits = 2
        ids = [await submit_until_it_is_stored(queue, seq_id=seq_id, payload=b"body") for seq_id in (1, 2)]
        assert [request.id for request in arrived] == ids
        assert await queue.payload(arrived[0]) == b"body"
        async with database.reading() as db:
            assert await db.scalar(select(func.count()).select_from(RequestRow)) == 2


async def test_an_outcome_whose_commit_seemed_to_fail_is_stored_once(
    all_in_files, running_queue, database, tmp_path
):
    unsure = UnsureDatabase(database)
    async with running_queue(unsure, tmp_path) as queue:
        request_id = await submit(queue)
        unsure.unsure_commits = 5
        queue.resolve(request_id, RESULT)
        assert await queue.wait(request_id, timeout=30) == RESULT
    compress = zstandard.ZstdCompressor(level=1, write_checksum=True).compress
    (file,) = (tmp_path / "payloads").glob("*.zst")
    assert file.stat().st_size == len(compress(b"{}")) + len(compress(RESULT.body))  # each once


async def test_a_full_disk_refuses_work_and_keeps_results_until_there_is_room(small_disk, no_cache):
    async with queue_on(None, small_disk) as queue:
        first, second = await submit(queue, 1), await submit(queue, 2)
        ballast = fill(small_disk)
        for request_id in (first, second):
            queue.resolve(request_id, RESULT)
        with pytest.raises(Unavailable, match="send it again"):
            await submit(queue, 3, b"y" * 100_000)
        files = len(list((small_disk / "payloads").iterdir()))
        await asyncio.sleep(0.3)  # several attempts
        assert len(list((small_disk / "payloads").iterdir())) == files
        assert await queue.wait(first, timeout=0) is None
        ballast.unlink()
        for request_id in (first, second):
            assert await queue.wait(request_id, timeout=30) == RESULT
        await submit_until_it_is_stored(queue, seq_id=3)


async def test_a_disk_that_becomes_read_only_pauses_the_queue(queue, monkeypatch):
    request_id = await submit(queue)
    with monkeypatch.context() as patch:
        patch.setattr(PayloadFiles, "write", read_only)
        queue.resolve(request_id, RESULT)
        with pytest.raises(Unavailable):
            await submit(queue, 2)
        assert await queue.wait(request_id, timeout=0.2) is None
    assert await queue.wait(request_id, timeout=30) == RESULT


def read_only(*_):
    raise OSError(errno.EROFS, "Read-only file system")


async def test_a_read_only_data_directory_is_refused_at_start(small_disk):
    database = await open_database("sqlite://", small_disk)
    make_read_only(small_disk)
    with pytest.raises(StartError, match=r"cannot write to .*Read-only file system; make it writable"):
        await open_queue(database, small_disk)
    await database.close()


async def test_nothing_is_lost_while_postgres_is_down(mortal_postgres, tmp_path, no_cache):
    state = DiskGuard(tmp_path)
    async with queue_on(mortal_postgres.get_uri(), tmp_path, state) as queue:
        answered, unanswered = await submit(queue, 1), await submit(queue, 2)
        queue.resolve(answered, RESULT)
        await queue.flush()
        await asyncio.to_thread(mortal_postgres.stop)
        with pytest.raises(Unavailable, match="send it again"):
            await submit(queue, 3)
        assert "goes on when its disk and database are back" in state.problem
        queue.resolve(unanswered, RESULT)
        assert await queue.wait(answered, timeout=0.1) is None  # the client asks again
        sending = asyncio.create_task(submit_until_it_is_stored(queue, seq_id=3))
        await asyncio.to_thread(mortal_postgres.start)
        assert await queue.wait(unanswered, timeout=60) == RESULT
        assert await queue.wait(answered, timeout=60) == RESULT
        await sending
        assert state.problem is None


@pytest.fixture
def damage_payloads(tmp_path):
    def damage_payloads():
        for path in (tmp_path / "payloads").glob("*.zst"):
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)

    return damage_payloads


async def test_a_damaged_payload_is_told_from_one_that_cannot_be_read_now(
    all_in_files, no_cache, queue, arrivals, damage_payloads
):
    await submit(queue, payload=b"body")
    damage_payloads()
    with pytest.raises(DamagedBody, match="lost the body of this request"):
        await queue.payload(arrivals[0])


async def test_a_damaged_result_is_a_failure_of_the_server(no_cache, queue, damage_payloads, caplog):
    request_id = await submit(queue)
    queue.resolve(request_id, RESULT)
    await queue.flush()
    damage_payloads()
    assert await queue.wait(request_id, timeout=5) == Failed(
        "the server has lost this result, its file is damaged or missing", "server"
    )
    assert "000000000000.zst is damaged" in caplog.text


async def test_without_room_new_work_is_refused_with_the_reason_and_old_work_goes_on(
    api, model_id, services, tmp_path
):
    request = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": 1e-4}}
    accepted = await api.post("optim_step", json=request)
    services.storage._min_free = "100%"
    services.storage.measure()
    refused = await api.post("optim_step", json=request | {"seq_id": 2})
    assert refused.status_code == 503
    assert "the server's disk is almost full" in refused.json()["error"]
    result = await api.post("retrieve_future", json={"request_id": accepted.json()["request_id"]})
    assert result.status_code == 200
    services.storage._min_free = "0"
    services.storage.measure()
    assert (await api.post("optim_step", json=request | {"seq_id": 2})).status_code == 200


def test_a_disk_that_cannot_be_reached_is_a_pause_until_it_can(tmp_path):
    state = DiskGuard(tmp_path / "mounted")
    state.measure()
    assert "disk cannot be reached (No such file or directory)" in state.problem
    (tmp_path / "mounted").mkdir()
    state.measure()
    assert state.problem is None


async def test_the_disk_is_looked_at_and_the_reaper_runs_when_it_becomes_full(services, monkeypatch):
    reaped = asyncio.Event()

    async def reap(*_, **__):
        reaped.set()

    monkeypatch.setattr(services.reaper, "reap", reap)
    services.storage._min_free = "100%"
    keeping = asyncio.create_task(housekeeping.run_housekeeping(services))
    await asyncio.wait_for(reaped.wait(), 30)
    keeping.cancel()
    await asyncio.wait([keeping])
    assert services.storage.is_short


async def test_who_waits_for_a_result_is_told_that_nothing_can_be_stored(
    api, model_id, services, monkeypatch
):
    async def not_yet(*_):
        return None

    monkeypatch.setattr(services.queue, "wait", not_yet)
    request = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": 1e-4}}
    accepted = (await api.post("optim_step", json=request)).json()["request_id"]
    monkeypatch.setattr(services.storage, "succeeded", lambda: None)  # of the request, just now
    services.storage.failed(OSError("gone"))
    told = await api.post("retrieve_future", json={"request_id": accepted})
    assert told.status_code == 408
    assert told.json()["queue_state"] == "paused_capacity"
    assert "cannot store anything now" in told.json()["queue_state_reason"]


async def refuse(work):
    raise ConnectionRefusedError("the database is gone")


async def test_routes_answer_503_while_the_database_is_gone(api, model_id, services, monkeypatch):
    monkeypatch.setattr("spmd_tx.coordinator.storage.outages.READ_AGAIN_SECONDS", 60.0)

    @asynccontextmanager
    async def gone():
        raise ConnectionRefusedError("the database is gone")
        yield

    monkeypatch.setattr(services.database, "transaction", gone)
    monkeypatch.setattr(services.database, "reading", gone)
    monkeypatch.setattr(services.database, "write", refuse)
    requests = [
        ("create_session", {"tags": [], "sdk_version": "0.38.0"}),
        ("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": 1e-4}}),
        ("get_info", {"model_id": "unknown"}),
        ("weights_info", {"tinker_path": "tinker://a/weights/b"}),
    ]
    for path, body in requests:
        answer = await api.post(path, json=body)
        assert (path, answer.status_code) == (path, 503)
        assert answer.json()["category"] == "server"
    assert (await api.get("sessions")).status_code == 503
    assert (await api.post("retrieve_future", json={"request_id": "unknown"})).status_code == 408


async def test_a_damaged_database_ends_the_server_rather_than_the_clients_patience(services):
    services.database.end = StartError("the database is damaged")
    with pytest.raises(StartError, match="damaged"):
        await housekeeping.run_housekeeping(services)


UNSTORABLE = ["\ud800", "a" * 20 + "\udfff"]
TOO_LARGE = 2**63  # for a BIGINT


def reported(caplog, text):
    """The error that the log has under the id that a client was told."""
    number = re.search(r"internal error ([0-9a-f]{12}): ", text)[1]
    (record,) = [each for each in caplog.records if number in each.getMessage()]
    assert record.exc_info is not None
    return record.exc_info[1]


async def test_a_request_that_cannot_be_written_down_is_refused_alone(queue, arrivals, caplog):
    writing = [submit(queue, seq_id=seq_id) for seq_id in (1, 2, TOO_LARGE, 3, 4, 5)]
    answers = await asyncio.gather(*writing, return_exceptions=True)
    refused = answers.pop(2)
    assert isinstance(refused, Abandoned)
    assert isinstance(reported(caplog, str(refused)), OverflowError | SQLAlchemyError)
    assert sorted(request.seq_id for request in arrivals) == [1, 2, 3, 4, 5]
    assert {request.id for request in arrivals} == set(answers)
    assert await submit(queue, seq_id=6)


async def test_a_nul_that_reaches_the_log_costs_nobody_else_anything(queue):
    nul = queue.submit("optim_step", "s:train:\0", 1, "s", b"{}")  # which SQLite takes
    first, _, second = await asyncio.gather(
        submit(queue, seq_id=1), nul, submit(queue, seq_id=2), return_exceptions=True
    )
    assert isinstance(first, str)
    assert isinstance(second, str)


async def test_a_request_that_cannot_be_written_down_is_no_outage(database, tmp_path):
    disk = DiskGuard(tmp_path)
    async with queue_on_database(database, tmp_path, disk) as queue:
        for _ in range(3):
            with pytest.raises(Abandoned):
                await submit(queue, seq_id=TOO_LARGE)
            assert disk.problem is None


@pytest.mark.parametrize("text", UNSTORABLE)
async def test_a_result_that_cannot_be_stored_fails_its_request_alone(queue, caplog, text):
    ids = [await submit(queue, seq_id=seq_id) for seq_id in range(1, 6)]
    for place, request_id in enumerate(ids):
        queue.resolve(request_id, Finished(text if place == 3 else "x", b"y" * 2000))
    outcomes = [await queue.wait(request_id, timeout=60) for request_id in ids]
    failed = outcomes.pop(3)
    assert all(isinstance(each, Finished) for each in outcomes)
    assert (failed.category, failed.executed) == ("server", True)  # its commands count
    assert isinstance(reported(caplog, failed.error), UnicodeError | SQLAlchemyError)
    history = await queue.history("s:train:0", after=-1)
    assert [each.request.seq_id for each in history.executed] == [1, 2, 3, 4, 5]


async def test_when_not_even_the_failure_can_be_stored_its_client_is_told_and_the_log_goes_on(
    queue, monkeypatch, caplog
):
    poisoned, other = await submit(queue, seq_id=1), await submit(queue, seq_id=2)
    original = rows.settle

    def settle(db, settled):
        settled = list(settled)
        if any(each.request.id == poisoned for each in settled):
            raise ZeroDivisionError
        original(db, settled)

    monkeypatch.setattr(rows, "settle", settle)
    queue.resolve(poisoned, RESULT)
    queue.resolve(other, RESULT)
    assert await queue.wait(other, timeout=60) == RESULT
    assert (await queue.wait(poisoned, timeout=60)).category == "server"
    await queue.flush()
    assert await submit(queue, seq_id=3)


@pytest.mark.parametrize("text", ["a\0b", *UNSTORABLE, "x" * 50_000])
async def test_any_text_can_be_the_reason_of_a_failure(queue, database, text):
    request_id = await submit(queue)
    queue.resolve(request_id, Failed(text, "user"))
    assert (await queue.wait(request_id, timeout=60)).category == "user"
    async with database.reading() as db:
        stored = await db.scalar(select(RequestRow.error))
    assert stored == Failed(text, "user").error
    assert len(stored) < 11_000
