import asyncio
import os
import time
from pathlib import Path
from threading import Timer

import msgspec
import pytest

from spmd_tx import durable_files
from spmd_tx.coordinator.checkpoints import catalog, files
from spmd_tx.coordinator.checkpoints.catalog import SaveOptions, open_checkpoints
from spmd_tx.coordinator.checkpoints.checkpoint_base import CheckpointBase
from spmd_tx.coordinator.checkpoints.store import LocalStore
from spmd_tx.coordinator.storage.disk import DiskGuard
from spmd_tx.coordinator.storage.outages import is_outage
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.errors import InvalidRequest, NotFound
from spmd_tx.protocol.commands import AdapterSpec
from tests.support.databases import mostly_sqlite

PATH = CheckpointPath("s:train:0", "weights", "step-1")
ADAPTER = AdapterSpec(rank=4, train_mlp=False)
BASE = CheckpointBase(("Qwen/Qwen3-0.6B",))


@pytest.fixture
async def checkpoints(database, tmp_path):
    return await open_checkpoints(
        database, LocalStore(tmp_path / "checkpoints"), DiskGuard(tmp_path / "checkpoints")
    )


async def save(checkpoints, path=PATH, content=b"weights", **options):
    partial = await checkpoints.begin(path, SaveOptions(**options))
    (partial / "inner").mkdir(parents=True)
    (partial / "inner" / "shard.bin").write_bytes(content)
    await checkpoints.complete(path, partial, ADAPTER, SaveOptions(**options), BASE)


async def test_a_saved_checkpoint_opens_where_the_documents_say(checkpoints, tmp_path):
    await save(checkpoints)
    folder, manifest = await checkpoints.open(PATH, BASE)
    assert folder == tmp_path / "checkpoints" / "s_train_0" / "weights" / "step-1"
    assert (folder / "inner" / "shard.bin").read_bytes() == b"weights"
    assert manifest.adapter == ADAPTER
    assert manifest.files == {"inner/shard.bin": 7}


@mostly_sqlite
async def test_a_checkpoint_that_is_still_being_written_cannot_be_opened(checkpoints):
    (await checkpoints.begin(PATH, SaveOptions())).mkdir()
    with pytest.raises(NotFound, match="does not exist"):
        await checkpoints.open(PATH, BASE)


async def test_a_run_whose_name_no_database_takes_has_no_checkpoints(checkpoints):
    with pytest.raises(NotFound, match="does not exist"):
        await checkpoints.find(CheckpointPath("s\0:train:0", "weights", "step-1"))


async def test_a_name_is_used_twice_only_on_demand(checkpoints):
    await save(checkpoints, content=b"old")
    with pytest.raises(InvalidRequest, match="overwrite=True"):
        await checkpoints.begin(PATH, SaveOptions())
    await save(checkpoints, content=b"new", overwrite=True)
    folder, _ = await checkpoints.open(PATH, BASE)
    assert (folder / "inner" / "shard.bin").read_bytes() == b"new"


@mostly_sqlite
@pytest.mark.parametrize("kind", ["sampler_weights", "external_weights"])
async def test_who_may_not_overwrite_is_told_how_to_free_the_name(checkpoints, kind):
    path = PATH._replace(kind=kind)
    await save(checkpoints, path)
    with pytest.raises(InvalidRequest, match="delete that one first") as caught:
        await checkpoints.begin(path, SaveOptions())
    assert "overwrite" not in str(caught.value)  # the SDK's calls for these kinds have no such argument


@mostly_sqlite
async def test_a_name_that_clients_cannot_address_is_refused_and_leaves_nothing(checkpoints, tmp_path):
    with pytest.raises(InvalidRequest, match="none of / "):
        await checkpoints.begin(PATH._replace(name="step-1#2"), SaveOptions(overwrite=True))
    assert not list((tmp_path / "checkpoints").glob("*/*/*"))


@mostly_sqlite
@pytest.mark.parametrize("taken, name", [("final", "Final"), ("fin\xe9", "fine\u0301"), ("final", "final ")])
async def test_a_name_that_the_file_system_confuses_is_refused(checkpoints, monkeypatch, taken, name):
    """Some file systems ignore case, Unicode's forms or spaces: the folder is there, listed otherwise."""
    await save(checkpoints, PATH._replace(name=taken))
    folder, _ = await checkpoints.open(PATH._replace(name=taken), BASE)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: self == folder.with_name(name) or exists(self))
    with pytest.raises(InvalidRequest, match="cannot tell apart"):
        files.prepare(folder.with_name(name))
    assert files.prepare(folder) != folder  # its own name may be overwritten


@mostly_sqlite
async def test_who_links_between_the_two_renames_of_an_overwrite_waits_for_the_second(checkpoints, tmp_path):
    await save(checkpoints)
    folder, _ = await checkpoints.open(PATH, BASE)
    away = folder.rename(folder.with_name(".away"))
    back = Timer(0.2, away.rename, [folder])
    back.start()
    files.link(PATH, folder, tmp_path / "link")
    back.join()
    assert (tmp_path / "link" / "inner" / "shard.bin").read_bytes() == b"weights"


async def test_an_interrupted_overwrite_leaves_the_old_checkpoint(checkpoints, database, tmp_path):
    await save(checkpoints, content=b"old")
    (await checkpoints.begin(PATH, SaveOptions(overwrite=True))).mkdir()
    restarted = await open_checkpoints(
        database, LocalStore(tmp_path / "checkpoints"), DiskGuard(tmp_path / "checkpoints")
    )
    folder, _ = await restarted.open(PATH, BASE)
    assert (folder / "inner" / "shard.bin").read_bytes() == b"old"
    assert [path.name for path in folder.parent.iterdir()] == ["step-1"]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("can_exchange", [True, False])
async def test_who_reads_while_a_checkpoint_is_overwritten_gets_one_or_the_other(
    checkpoints, tmp_path, monkeypatch, can_exchange
):
    if not can_exchange:
        monkeypatch.setattr(durable_files, "_exchange", lambda *_: False)
    await save(checkpoints, content=b"0" * 10_000)
    is_over, reads = False, 0

    async def overwrite():
        nonlocal is_over
        for number in range(1, 16):
            content = str(number).encode() * 10_000
            await save(checkpoints, content=content, overwrite=True, request_id=str(number))
        is_over = True

    async def read(reader):
        nonlocal reads
        while not is_over:
            folder, _ = await checkpoints.open(PATH, BASE)
            await checkpoints.describe(PATH)
            link = tmp_path / "links" / f"{reader}-{reads}"
            manifest = await asyncio.to_thread(files.link, PATH, folder, link)
            number = (link / "inner" / "shard.bin").read_bytes()[:10_000:10_000].decode()
            assert manifest.saved_by is None or manifest.saved_by.startswith(number)
            reads += 1

    async with asyncio.TaskGroup() as tasks:
        for work in (overwrite(), *(read(number) for number in range(3))):
            tasks.create_task(work)
    assert reads > 10
    assert os.listdir(tmp_path / "checkpoints" / "s_train_0" / "weights") == ["step-1"]


@mostly_sqlite
async def test_each_attempt_to_save_has_a_place_of_its_own(checkpoints):
    """A worker that was given up, but lives, cannot touch what its successor writes."""
    options = SaveOptions(request_id="request")
    of_the_earlier = await checkpoints.begin(PATH, options)
    of_the_later = await checkpoints.begin(PATH, options)
    of_the_earlier.mkdir()
    (of_the_earlier / "shard.bin").write_bytes(b"half")
    of_the_later.mkdir()
    (of_the_later / "shard.bin").write_bytes(b"weights")
    await checkpoints.complete(PATH, of_the_later, ADAPTER, options, BASE)
    (of_the_earlier / "shard.bin").write_bytes(b"more than half")
    folder, manifest = await checkpoints.open(PATH, BASE)
    assert manifest.files == {"shard.bin": 7}
    assert (folder / "shard.bin").read_bytes() == b"weights"


async def test_what_an_attempt_that_failed_has_written_is_deleted_after_the_next_has_begun(
    checkpoints, monkeypatch
):
    monkeypatch.setattr(catalog, "GIVEN_UP_SECONDS", 0.0)
    failed = await checkpoints.begin(PATH, SaveOptions())
    failed.mkdir()
    (failed / "shard.bin").write_bytes(b"half")
    await save(checkpoints)
    async with asyncio.timeout(60):
        while failed.exists():
            await asyncio.sleep(0.01)
    await checkpoints.open(PATH, BASE)


async def test_a_checkpoint_that_was_replaced_does_not_come_back_when_its_save_is_completed_again(
    checkpoints, monkeypatch
):
    """The disk fails between the change of names and the end."""
    await save(checkpoints, content=b"old", request_id="first")
    options = SaveOptions(overwrite=True, request_id="second")
    staged = await checkpoints.begin(PATH, options)
    staged.mkdir()
    (staged / "shard.bin").write_bytes(b"new")
    rename = Path.rename

    def broken(self, target):
        if str(target).endswith(".deleted"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", broken)
        with pytest.raises(OSError, match="Input/output"):
            await checkpoints.complete(PATH, staged, ADAPTER, options, BASE)
    await checkpoints.complete(PATH, staged, ADAPTER, options, BASE)
    folder, manifest = await checkpoints.open(PATH, BASE)
    assert (manifest.saved_by, (folder / "shard.bin").read_bytes()) == ("second", b"new")


@mostly_sqlite
async def test_a_saved_checkpoint_is_durable_with_all_its_names(checkpoints, tmp_path, synced):
    await save(checkpoints)
    base = tmp_path / "checkpoints"
    staged = next(path.parent for path in synced if path.name == "inner")
    assert {staged / "inner", staged / "inner" / "shard.bin", staged} <= set(synced)
    assert {tmp_path, base, base / "s_train_0", base / "s_train_0" / "weights"} <= set(synced)


@mostly_sqlite
async def test_a_truncated_file_is_named(checkpoints):
    await save(checkpoints)
    folder, _ = await checkpoints.open(PATH, BASE)
    (folder / "inner" / "shard.bin").write_bytes(b"weig")
    with pytest.raises(InvalidRequest, match=r"shard\.bin has 4 bytes instead of 7"):
        await checkpoints.open(PATH, BASE)


def test_a_manifest_that_is_no_text_is_none(tmp_path):
    (tmp_path / files.MANIFEST).write_bytes(b'{"run_id": "\xff"}')
    assert files.read_manifest(tmp_path) is None


@mostly_sqlite
async def test_a_state_that_was_written_in_parts_only_is_refused(checkpoints):
    """Orbax took the folder of an earlier version for a pattern, and found no parts to put together."""
    partial = await checkpoints.begin(PATH, SaveOptions())
    (partial / "ocdbt.process_0").mkdir(parents=True)
    (partial / "ocdbt.process_0" / "manifest.ocdbt").write_bytes(b"part")
    await checkpoints.complete(PATH, partial, ADAPTER, SaveOptions(), BASE)
    with pytest.raises(InvalidRequest, match=r"is damaged: .*/manifest\.ocdbt was not written"):
        await checkpoints.open(PATH, BASE)


@mostly_sqlite
async def test_a_flipped_bit_is_found(checkpoints):
    await save(checkpoints)
    folder, _ = await checkpoints.open(PATH, BASE)
    (folder / "inner" / "shard.bin").write_bytes(b"weightz")
    with pytest.raises(InvalidRequest, match=r"is damaged: .*shard\.bin has another content"):
        await checkpoints.open(PATH, BASE)


@mostly_sqlite
async def test_a_checkpoint_of_the_first_version_had_no_digests_and_can_be_read(checkpoints):
    await save(checkpoints)
    folder, manifest = await checkpoints.open(PATH, BASE)
    old = msgspec.to_builtins(manifest)
    del old["digests"]
    (folder / files.MANIFEST).write_bytes(msgspec.json.encode(old))
    assert (await checkpoints.open(PATH, BASE)).manifest.files == manifest.files


@mostly_sqlite
async def test_a_checkpoint_of_a_newer_version_is_refused_by_its_format(checkpoints):
    await save(checkpoints)
    folder, manifest = await checkpoints.open(PATH, BASE)
    newer = msgspec.structs.replace(manifest, format=files.FORMAT + 1)
    (folder / files.MANIFEST).write_bytes(msgspec.json.encode(newer))
    with pytest.raises(InvalidRequest, match="has format 3, of a newer version of the server"):
        await checkpoints.open(PATH, BASE)


@mostly_sqlite
async def test_a_save_does_not_begin_while_there_is_no_room(database, tmp_path):
    storage = DiskGuard(tmp_path, "100%")
    checkpoints = await open_checkpoints(database, LocalStore(tmp_path / "checkpoints"), storage)
    storage.measure()
    storage._is_full = True
    with pytest.raises(OSError, match="too little space") as full:
        await checkpoints.begin(PATH, SaveOptions())
    assert is_outage(full.value)
    storage._min_free = "0"
    storage.measure()
    await checkpoints.begin(PATH, SaveOptions())


@mostly_sqlite
async def test_a_missing_file_is_named(checkpoints):
    await save(checkpoints)
    folder, _ = await checkpoints.open(PATH, BASE)
    (folder / "inner" / "shard.bin").unlink()
    with pytest.raises(InvalidRequest, match=r"shard\.bin is missing"):
        await checkpoints.open(PATH, BASE)


@mostly_sqlite
async def test_a_checkpoint_of_another_base_model_names_both(checkpoints):
    await save(checkpoints)
    with pytest.raises(InvalidRequest, match=r"was trained on 'Qwen/Qwen3-0\.6B'.*one of 'Qwen/Qwen3-4B'"):
        await checkpoints.open(PATH, CheckpointBase(("Qwen/Qwen3-4B",)))


@mostly_sqlite
async def test_a_checkpoint_keeps_the_base_of_its_model_and_opens_under_any_name_that_this_had(checkpoints):
    await save(checkpoints)
    renamed = CheckpointBase(("mine", "Qwen/Qwen3-0.6B"))
    assert (await checkpoints.open(PATH, renamed)).manifest.base_model == BASE.name
    assert (await checkpoints.find(PATH)).base_model == BASE.name


async def test_a_deleted_checkpoint_is_gone_from_disk(checkpoints):
    await save(checkpoints)
    folder, _ = await checkpoints.open(PATH, BASE)
    await checkpoints.delete(PATH)
    assert not folder.exists()
    with pytest.raises(NotFound):
        await checkpoints.find(PATH)
    with pytest.raises(NotFound):
        await checkpoints.delete(PATH)


async def test_a_checkpoint_outlives_its_time_only_when_told_so(checkpoints):
    await save(checkpoints, ttl_seconds=3600)
    assert await checkpoints.expire(time.time()) == []
    await checkpoints.set_ttl(PATH, None)
    assert await checkpoints.expire(time.time() + 3601) == []
    await checkpoints.set_ttl(PATH, 7200)
    assert await checkpoints.expire(time.time() + 7201) == [PATH]
    with pytest.raises(NotFound):
        await checkpoints.find(PATH)


async def test_an_expired_checkpoint_is_not_found_even_before_it_is_deleted(checkpoints, monkeypatch):
    await save(checkpoints, ttl_seconds=3600)
    later = time.time() + 3601
    monkeypatch.setattr(time, "time", lambda: later)
    with pytest.raises(NotFound, match="has expired"):
        await checkpoints.find(PATH)
    await save(checkpoints)


@mostly_sqlite
@pytest.mark.parametrize("ttl_seconds", [0, -1, 3599, 10**12])
async def test_an_impossible_time_to_live_is_refused(checkpoints, ttl_seconds):
    with pytest.raises(InvalidRequest, match="ttl_seconds"):
        await checkpoints.begin(PATH, SaveOptions(ttl_seconds=ttl_seconds))


async def test_rows_follow_the_folders_after_a_crash(checkpoints, database, tmp_path):
    lost, kept = PATH._replace(name="lost"), PATH._replace(name="kept")
    await save(checkpoints, lost)
    await save(checkpoints, kept)
    folder, _ = await checkpoints.open(lost, BASE)
    moved = PATH._replace(name="moved")
    folder.rename(folder.with_name("moved"))

    restarted = await open_checkpoints(
        database, LocalStore(tmp_path / "checkpoints"), DiskGuard(tmp_path / "checkpoints")
    )

    await restarted.open(kept, BASE)
    await restarted.open(moved, BASE)
    with pytest.raises(NotFound):
        await restarted.find(lost)


async def test_a_checkpoint_that_was_whole_when_the_server_died_is_kept(checkpoints, database, tmp_path):
    await save(checkpoints)
    folder, _ = await checkpoints.open(PATH, BASE)
    for name in (".step-1.0123456789abcdef.staged", ".step-1.partial"):  # the latter by earlier versions
        folder.rename(folder.with_name(name))
        restarted = await open_checkpoints(
            database,
            LocalStore(tmp_path / "checkpoints"),
            DiskGuard(tmp_path / "checkpoints"),
        )
        await restarted.open(PATH, BASE)
