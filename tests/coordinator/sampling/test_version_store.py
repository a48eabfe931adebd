"""Folders of versions that one group writes and others read."""

import asyncio
from types import SimpleNamespace

import pytest

from spmd_tx.coordinator.runtime.folder_names import folder_name
from spmd_tx.coordinator.sampling.version_store import VersionStore
from spmd_tx.errors import InvalidRequest, WorkerLost

MODEL = "alice:train:0"
SNAPSHOT = SimpleNamespace(id="alice:sample:0", model_id=MODEL, inflight=False)
INFLIGHT = SimpleNamespace(id="alice:sample:1", model_id=MODEL, session_id="alice", inflight=True)


class FakeReader:
    """Reads some folders; what it has sent is executed when ``last_reply`` is done."""

    def __init__(self, *folders):
        self.folders = set(folders)
        self.last_reply = None
        self.superseded = []

    def reads(self, folder):
        return folder in self.folders

    def supersede(self, version):
        self.superseded.append(version)


class FakePublisher(FakeReader):
    """Publishes when told to."""

    def __init__(self, store, error=None):
        super().__init__()
        self.store, self.error, self.asked = store, error, []
        self.may_publish = asyncio.Event()
        self.is_restored = asyncio.Event()

    def has_restored(self, sampler):
        return self.error is None and self.is_restored.is_set()

    async def restored(self, sampler):
        await self.is_restored.wait()
        if self.error is not None:
            raise self.error

    async def publish(self, sampler):
        self.asked.append(sampler.id)
        await self.may_publish.wait()
        if self.error is not None:
            raise self.error
        self.store.note_written(MODEL, "alice", sampler.id, 3 if sampler.inflight else None)


@pytest.fixture
async def store(tmp_path):
    store = VersionStore(tmp_path / "versions", is_shared=True)
    yield store
    await store.close()


def folder_in(store, name):
    folder = store.directory / name
    folder.mkdir()
    return folder


async def until(condition):
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def nowhere(sampler):
    return False


async def on_disk(sampler):
    return True


@pytest.fixture
def restored(store):
    """Workers that train, which have all models as they were."""
    publisher = FakePublisher(store)
    publisher.is_restored.set()
    store.join(publisher, publisher)
    return publisher


async def supplied(store, sampler, is_there=nowhere, seconds=0.05):
    """Whether a sampler's version is there soon."""
    try:
        async with asyncio.timeout(seconds):
            await store.supply(sampler, is_there)
    except TimeoutError:
        return False
    return True


async def test_a_folder_outlives_its_last_reader(store):
    folder = folder_in(store, "v1")
    one, other = FakeReader(folder), FakeReader(folder)
    store.join(one, None)
    store.join(other, None)
    one.folders.clear()
    store.discard([folder])
    await store.close()
    assert folder.exists()
    other.folders.clear()
    store.discard(())
    await store.close()
    assert not folder.exists()


async def test_a_folder_stays_until_commands_of_all_groups_were_executed(store):
    folder, reader = folder_in(store, "v1"), FakeReader()
    reader.last_reply = asyncio.get_running_loop().create_future()
    store.join(FakeReader(), None)
    store.join(reader, None)
    store.discard([folder])
    await asyncio.sleep(0.05)
    assert folder.exists()
    reader.last_reply.set_result("a reply")
    await until(lambda: not folder.exists())


async def test_a_lost_group_reads_nothing_any_more(store):
    folder = folder_in(store, "v1")
    reader = FakeReader(folder)
    store.join(reader, None)
    store.discard([folder])
    await store.close()
    assert folder.exists()
    store.leave(reader)
    await until(lambda: not folder.exists())


async def test_a_session_leaves_no_folder_also_of_versions_that_were_not_used_since_a_restart(store):
    own = [folder_in(store, folder_name(f"alice:sample:{number}")) for number in range(3)]
    others = folder_in(store, folder_name("alice2:sample:0"))
    store.end_session("alice")
    await store.close()
    assert not any(folder.exists() for folder in own)
    assert others.exists()


async def test_a_version_is_waited_for_until_there_are_workers_that_have_it(store):
    waiting = asyncio.create_task(store.supply(SNAPSHOT, nowhere))
    lost = FakePublisher(store, WorkerLost("gone"))
    lost.may_publish.set()
    store.join(lost, lost)
    await until(lambda: lost.asked)
    assert not waiting.done()
    store.leave(lost)
    publisher = FakePublisher(store)
    publisher.may_publish.set()
    store.join(publisher, publisher)
    await asyncio.wait_for(waiting, 10)
    assert publisher.asked == [SNAPSHOT.id]


async def test_a_version_that_is_nowhere_fails_who_wants_it(store):
    publisher = FakePublisher(store, InvalidRequest("the weights are not there"))
    publisher.may_publish.set()
    store.join(publisher, publisher)
    with pytest.raises(InvalidRequest, match="are not there"):
        await store.supply(SNAPSHOT, nowhere)


async def test_saves_that_run_again_after_a_restart_do_not_bring_back_older_versions(store):
    publisher = FakePublisher(store)
    store.join(publisher, publisher)
    store.note_saved(MODEL, "alice", 3)
    store.note_written(MODEL, "alice", "v3", 3)  # clients know of the one behind it
    assert not await supplied(store, INFLIGHT)
    assert store.newest(MODEL) is None
    assert await supplied(store, INFLIGHT, on_disk)  # the newest of all
    assert store.newest(MODEL) is None
    waiting = asyncio.create_task(store.supply(INFLIGHT, nowhere))
    store.note_saved(MODEL, "alice", 5)
    publisher.is_restored.set()
    await asyncio.sleep(0.01)
    assert not waiting.done()
    store.note_written(MODEL, "alice", "v5", 5)
    await asyncio.wait_for(waiting, 10)
    assert store.newest(MODEL) == "v5"


async def test_a_version_that_is_on_disk_is_not_the_newest_for_ever(store, restored):
    for seq_id in (3, 5):
        store.note_saved(MODEL, "alice", seq_id)
        store.note_written(MODEL, "alice", f"v{seq_id}", seq_id)
        assert await supplied(store, INFLIGHT, on_disk)
        assert store.newest(MODEL) == f"v{seq_id}"


async def test_a_model_that_is_lost_while_it_is_restored_is_waited_for(store):
    lost = FakePublisher(store, WorkerLost("gone"))
    store.join(lost, lost)
    store.note_saved(MODEL, "alice", 3)
    store.note_written(MODEL, "alice", "v3", 3)
    waiting = asyncio.create_task(store.supply(INFLIGHT, nowhere))
    await asyncio.sleep(0)
    lost.is_restored.set()  # or so it seems
    store.leave(lost)
    await asyncio.sleep(0.01)
    assert not waiting.done()
    publisher = FakePublisher(store)
    publisher.is_restored.set()
    store.join(publisher, publisher)
    await asyncio.wait_for(waiting, 10)
    assert store.newest(MODEL) == "v3"


async def test_a_model_without_a_save_behind_its_snapshot_publishes_what_it_has(store, restored):
    restored.may_publish.set()
    assert await supplied(store, INFLIGHT)
    assert restored.asked == [INFLIGHT.id]


async def test_what_clients_know_of_is_never_older_elsewhere(store, restored):
    store.note_saved(MODEL, "alice", 3)
    assert not await supplied(store, INFLIGHT)
    store.note_written(MODEL, "alice", "v3", 3)
    assert await supplied(store, INFLIGHT)
    assert store.newest(MODEL) == "v3"
    store.note_saved(MODEL, "alice", 5)
    assert store.newest(MODEL) is None
    waiting = asyncio.create_task(store.supply(INFLIGHT, nowhere))
    await asyncio.sleep(0)
    store.note_written(MODEL, "alice", "v5", 5)
    await asyncio.wait_for(waiting, 10)
    assert store.newest(MODEL) == "v5"


async def test_all_groups_forget_what_was_superseded(store, restored):
    reader = FakeReader()
    store.join(reader, None)
    for seq_id in (3, 5):
        store.note_saved(MODEL, "alice", seq_id)
        store.note_written(MODEL, "alice", f"v{seq_id}", seq_id)
    assert await supplied(store, INFLIGHT)
    store.supersede("v3")
    assert reader.superseded == ["v3"]
    assert not store.is_written(MODEL, "v3")
    assert store.newest(MODEL) == "v5"
