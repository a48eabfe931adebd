import asyncio
import errno
import os
import time

import msgspec
import pytest
from sqlalchemy import delete

from spmd_tx.coordinator.checkpoints import remote_store
from spmd_tx.coordinator.checkpoints.catalog import SaveOptions, open_checkpoints
from spmd_tx.coordinator.checkpoints.checkpoint_base import CheckpointBase
from spmd_tx.coordinator.checkpoints.files import MANIFEST
from spmd_tx.coordinator.checkpoints.remote_files import OWNER, RemoteFiles
from spmd_tx.coordinator.checkpoints.remote_store import CheckpointCache, open_remote_store
from spmd_tx.coordinator.checkpoints.store import LocalStore
from spmd_tx.coordinator.storage.disk import DiskGuard
from spmd_tx.coordinator.storage.tables import CheckpointRow
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.errors import InvalidRequest, NotFound, StartError
from tests.coordinator.checkpoints.test_catalog import ADAPTER, PATH, save

pytestmark = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
OTHER = PATH._replace(name="step-2")

BASE = CheckpointBase(("Qwen/Qwen3-0.6B",))


@pytest.fixture
def base(tmp_path):
    return tmp_path / "elsewhere"


@pytest.fixture
def opened(database, tmp_path, base):
    """Open the checkpoints, as often as the server starts."""

    async def opened(most_bytes=1 << 20, store=None):
        directory = tmp_path / "checkpoints"
        cache = CheckpointCache(directory, most_bytes)
        store = store or await asyncio.to_thread(open_remote_store, base.as_uri(), tmp_path, cache)
        return await open_checkpoints(database, store, DiskGuard(directory))

    return opened


@pytest.fixture
async def checkpoints(opened):
    return await opened()


def stored(base):
    return sorted(str(path.relative_to(base)) for path in base.rglob("*") if path.is_file())


def cached(tmp_path, path=PATH):
    return path.folder(tmp_path / "checkpoints")


async def content(checkpoints, path=PATH):
    folder, _ = await checkpoints.open(path, BASE)
    return (folder / "inner" / "shard.bin").read_bytes()


async def test_a_saved_checkpoint_is_elsewhere_and_comes_back(checkpoints, base, tmp_path):
    await save(checkpoints)
    version = (await checkpoints.describe(PATH)).version
    place = "s_train_0/weights/step-1"
    files = [f"{place}/{version}/inner/shard.bin", f"{place}/{MANIFEST}", OWNER]
    assert stored(base) == sorted(files)
    remote_store.files.delete(cached(tmp_path))
    assert await content(checkpoints) == b"weights"
    assert cached(tmp_path).exists()


async def test_a_part_is_read_without_the_rest(checkpoints, tmp_path):
    await save(checkpoints)
    remote_store.files.delete(cached(tmp_path))
    manifest = await checkpoints.describe(PATH)
    assert checkpoints.read(PATH, manifest, "inner/shard.bin", 2, 3) == b"igh"
    assert not cached(tmp_path).exists()


async def test_overwriting_leaves_one_version(checkpoints, base):
    await save(checkpoints, content=b"old")
    await save(checkpoints, content=b"new", overwrite=True)
    assert await content(checkpoints) == b"new"
    assert len(stored(base)) == 3


async def test_what_is_deleted_or_has_expired_is_gone_everywhere(checkpoints, base, tmp_path):
    await save(checkpoints)
    await save(checkpoints, OTHER, ttl_seconds=3600)
    await checkpoints.delete(PATH)
    assert await checkpoints.expire(time.time() + 3601) == [OTHER]
    assert stored(base) == [OWNER]
    assert not cached(tmp_path).exists()
    with pytest.raises(NotFound):
        await checkpoints.open(PATH, BASE)


async def test_a_deletion_takes_no_name_that_only_begins_like_its_own(opened, base, tmp_path, monkeypatch):
    """Some object stores list what begins with the name of a folder when the folder is not there."""
    files = RemoteFiles(base.as_uri())
    checkpoints = await opened(store=remote_store.RemoteStore(files, CheckpointCache(tmp_path / "cache", 1)))
    longer = PATH._replace(name=PATH.name + "0")
    await save(checkpoints, PATH)
    await save(checkpoints, longer)
    whole = stored(base)
    find = files._system.find

    def find_by_beginning(place, **options):
        found = find(place.rpartition("/")[0], **options)
        return find(place, **options) or {each: found[each] for each in found if each.startswith(place)}

    monkeypatch.setattr(files._system, "find", find_by_beginning)
    assert files.sizes("s_train_0/weights/step") == {}
    await checkpoints.delete(PATH)
    await asyncio.to_thread(checkpoints._store.delete, PATH)  # again, as after a crash between files and rows
    assert stored(base) == [each for each in whole if not each.startswith("s_train_0/weights/step-1/")]
    assert await content(checkpoints, longer) == b"weights"


async def test_what_is_changed_is_changed_in_both_places(checkpoints, opened, database, tmp_path):
    await save(checkpoints, ttl_seconds=3600)
    await checkpoints.set_ttl(PATH, None)
    await checkpoints.set_public(PATH, True)
    manifest = await checkpoints.describe(PATH)
    assert (manifest.expires_at, manifest.is_public) == (None, True)
    local = msgspec.json.decode((cached(tmp_path) / MANIFEST).read_bytes())
    assert (local["expires_at"], local["is_public"]) == (None, True)


async def test_a_copy_is_of_its_own(checkpoints):
    await save(checkpoints)
    copy = CheckpointPath("t:train:0", "weights", "step-1")
    await checkpoints.copy(PATH, copy, SaveOptions())
    await checkpoints.delete(PATH)
    assert await content(checkpoints, copy) == b"weights"


async def test_the_next_start_knows_what_is_there_and_sweeps_up_after_a_crash(
    checkpoints, opened, base, tmp_path
):
    await save(checkpoints)
    version = (await checkpoints.describe(PATH)).version
    place = base / "s_train_0" / "weights"
    for leftover in ("step-1/older/shard.bin", "step-9/half/shard.bin", f"step-1/{MANIFEST}.ab.tmp"):
        (place / leftover).parent.mkdir(parents=True, exist_ok=True)
        (place / leftover).write_bytes(b"half")
    (base / "notes.txt").write_bytes(b"of somebody else")
    unfinished = await checkpoints.begin(OTHER, SaveOptions())
    unfinished.mkdir()
    again = await opened()
    assert await content(again) == b"weights"
    assert {file for file in stored(base) if file.startswith("s_train")} == {
        f"s_train_0/weights/step-1/{version}/inner/shard.bin",
        f"s_train_0/weights/step-1/{MANIFEST}",
    }
    assert (base / "notes.txt").exists()
    assert not unfinished.exists()


async def test_a_database_that_was_lost_is_made_again_from_the_store(checkpoints, opened, tmp_path):
    await save(checkpoints, user_metadata={"step": "1"})
    await checkpoints.set_public(PATH, True)
    async with checkpoints._database.transaction() as db:
        await db.execute(delete(CheckpointRow))
    row = await (await opened()).find(PATH)
    assert (row.user_metadata, row.is_public) == ({"step": "1"}, True)


async def test_checkpoints_from_before_move_to_the_store(database, opened, base, tmp_path):
    local = await open_checkpoints(
        database, LocalStore(tmp_path / "checkpoints"), DiskGuard(tmp_path / "checkpoints")
    )
    await save(local)
    moved = await opened()
    remote_store.files.delete(cached(tmp_path))
    assert await content(moved) == b"weights"


async def test_a_damaged_copy_is_fetched_again_and_a_damaged_original_is_refused(checkpoints, base, tmp_path):
    await save(checkpoints)
    (cached(tmp_path) / "inner" / "shard.bin").write_bytes(b"weightz")
    assert await content(checkpoints) == b"weights"
    remote_store.files.delete(cached(tmp_path))
    (original,) = base.rglob("shard.bin")
    original.write_bytes(b"weightz")
    with pytest.raises(InvalidRequest, match="has another content"):
        await checkpoints.open(PATH, BASE)
    original.unlink()
    with pytest.raises(InvalidRequest, match=r"inner/shard\.bin is not in the store"):
        await checkpoints.open(PATH, BASE)


async def test_the_copies_that_were_unused_for_longest_make_room(opened, tmp_path):
    checkpoints = await opened(most_bytes=2500)
    paths = [PATH._replace(name=f"step-{number}") for number in range(3)]
    for age, path in enumerate(paths):
        await save(checkpoints, path, content=bytes(1000))
        at = time.time() - remote_store.IN_USE_SECONDS - 100 + age
        os.utime(cached(tmp_path, path) / MANIFEST, (at, at))
    await checkpoints.open(paths[0], BASE)
    await save(checkpoints, PATH._replace(name="new"), content=bytes(100))
    assert [cached(tmp_path, path).exists() for path in paths] == [True, False, False]
    for path in paths:
        assert await content(checkpoints, path) == bytes(1000)


class Failing(RemoteFiles):
    """Does not answer from the n-th call on."""

    calls_left = 1 << 30

    def _place(self, name):
        self.calls_left -= 1
        if self.calls_left < 0:
            raise ConnectionError("the store does not answer")
        return super()._place(name)


@pytest.mark.parametrize("calls", range(8))
async def test_a_save_that_is_interrupted_anywhere_can_go_on(opened, base, tmp_path, calls):
    cache = CheckpointCache(tmp_path / "checkpoints", 1 << 20)
    files = Failing(base.as_uri())
    store = remote_store.RemoteStore(files, cache)
    checkpoints = await opened(store=store)
    await save(checkpoints, content=b"old")
    options = SaveOptions(overwrite=True, request_id="r")
    staged = await checkpoints.begin(PATH, options)
    (staged / "inner").mkdir(parents=True)
    (staged / "inner" / "shard.bin").write_bytes(b"new")
    files.calls_left = calls
    try:
        await checkpoints.complete(PATH, staged, ADAPTER, options, BASE)
    except ConnectionError:  # an outage, after which the same is tried again
        files.calls_left = 1 << 30
        assert await content(checkpoints) in (b"old", b"new")
        await checkpoints.complete(PATH, staged, ADAPTER, options, BASE)
    files.calls_left = 1 << 30
    assert await content(checkpoints) == b"new"
    assert await content(await opened(store=store)) == b"new"
    assert len(stored(base)) == 2


async def test_a_store_that_does_not_answer_stops_no_start_and_forgets_nothing(
    checkpoints, opened, base, tmp_path
):
    await save(checkpoints, ttl_seconds=3600)
    files = Failing(base.as_uri())
    files.calls_left = 0
    store = remote_store.RemoteStore(files, CheckpointCache(tmp_path / "checkpoints", 1 << 20))
    again = await opened(store=store)
    await again.find(PATH)
    with pytest.raises(ConnectionError):
        await again.open(PATH, BASE)
    assert await again.expire(time.time() + 3601) == []
    files.calls_left = 1 << 30
    assert await content(again) == b"weights"
    assert await again.expire(time.time() + 3601) == [PATH]


async def test_a_base_belongs_to_one_server(checkpoints, base, tmp_path_factory):
    other = tmp_path_factory.mktemp("another")
    with pytest.raises(StartError, match="belongs to a server with another data directory"):
        open_remote_store(base.as_uri(), other, CheckpointCache(other / "checkpoints", 1))


@pytest.mark.parametrize(
    "url, complaint",
    [
        ("memory://x", "would lose everything"),
        ("nonsense://x", "cannot be used: Protocol not known"),
        ("hf://", "names no bucket"),
        ("dropbox://x", "needs another package"),
    ],
)
def test_a_base_that_cannot_be_used_is_refused(database_url, tmp_path, url, complaint):
    with pytest.raises(StartError, match=complaint):
        open_remote_store(url, tmp_path, CheckpointCache(tmp_path, 1))


def test_a_place_where_nothing_can_be_written_is_refused(database_url, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(RemoteFiles, "write", refuse)
    with pytest.raises(StartError, match="cannot be written"):
        open_remote_store(tmp_path.as_uri(), tmp_path, CheckpointCache(tmp_path, 1))
