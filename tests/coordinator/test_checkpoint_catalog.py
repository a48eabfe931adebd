import time

import msgspec
import pytest

from spmd_tx.coordinator import checkpoint_files
from spmd_tx.coordinator.checkpoint_catalog import SaveOptions, open_checkpoints
from spmd_tx.coordinator.checkpoint_files import CheckpointPath
from spmd_tx.coordinator.patience import is_outage
from spmd_tx.coordinator.storage import Storage
from spmd_tx.errors import InvalidRequest, NotFound
from spmd_tx.protocol import AdapterSpec

PATH = CheckpointPath("s:train:0", "weights", "step-1")
ADAPTER = AdapterSpec(rank=4, train_mlp=False)


@pytest.fixture
async def checkpoints(database, tmp_path):
    return await open_checkpoints(database, tmp_path / "checkpoints", "Qwen/Qwen3-0.6B")


async def save(checkpoints, path=PATH, content=b"weights", **options):
    partial = await checkpoints.begin(path, SaveOptions(**options))
    (partial / "inner").mkdir(parents=True)
    (partial / "inner" / "shard.bin").write_bytes(content)
    await checkpoints.complete(path, partial, ADAPTER, SaveOptions(**options))


async def test_a_saved_checkpoint_opens_where_the_documents_say(checkpoints, tmp_path):
    await save(checkpoints)
    folder, manifest = await checkpoints.open(PATH)
    assert folder == tmp_path / "checkpoints" / "s_train_0" / "weights" / "step-1"
    assert (folder / "inner" / "shard.bin").read_bytes() == b"weights"
    assert manifest.adapter == ADAPTER
    assert manifest.files == {"inner/shard.bin": 7}


async def test_a_checkpoint_that_is_still_being_written_cannot_be_opened(checkpoints):
    (await checkpoints.begin(PATH, SaveOptions())).mkdir()
    with pytest.raises(NotFound, match="does not exist"):
        await checkpoints.open(PATH)


async def test_a_name_is_used_twice_only_on_demand(checkpoints):
    await save(checkpoints, content=b"old")
    with pytest.raises(InvalidRequest, match="overwrite=True"):
        await checkpoints.begin(PATH, SaveOptions())
    await save(checkpoints, content=b"new", overwrite=True)
    folder, _ = await checkpoints.open(PATH)
    assert (folder / "inner" / "shard.bin").read_bytes() == b"new"


async def test_an_interrupted_overwrite_leaves_the_old_checkpoint(checkpoints, database, tmp_path):
    await save(checkpoints, content=b"old")
    (await checkpoints.begin(PATH, SaveOptions(overwrite=True))).mkdir()
    restarted = await open_checkpoints(database, tmp_path / "checkpoints", "Qwen/Qwen3-0.6B")
    folder, _ = await restarted.open(PATH)
    assert (folder / "inner" / "shard.bin").read_bytes() == b"old"
    assert [path.name for path in folder.parent.iterdir()] == ["step-1"]


async def test_a_truncated_file_is_named(checkpoints):
    await save(checkpoints)
    folder, _ = await checkpoints.open(PATH)
    (folder / "inner" / "shard.bin").write_bytes(b"weig")
    with pytest.raises(InvalidRequest, match=r"shard\.bin has 4 bytes instead of 7"):
        await checkpoints.open(PATH)


async def test_a_flipped_bit_is_found(checkpoints):
    await save(checkpoints)
    folder, _ = await checkpoints.open(PATH)
    (folder / "inner" / "shard.bin").write_bytes(b"weightz")
    with pytest.raises(InvalidRequest, match=r"is damaged: .*shard\.bin has another content"):
        await checkpoints.open(PATH)


async def test_a_checkpoint_of_the_first_version_had_no_digests_and_can_be_read(checkpoints):
    await save(checkpoints)
    folder, manifest = await checkpoints.open(PATH)
    old = msgspec.to_builtins(manifest)
    del old["digests"]
    (folder / checkpoint_files.MANIFEST).write_bytes(msgspec.json.encode(old))
    assert (await checkpoints.open(PATH)).manifest.files == manifest.files


async def test_a_checkpoint_of_a_newer_version_is_refused_by_its_format(checkpoints):
    await save(checkpoints)
    folder, manifest = await checkpoints.open(PATH)
    newer = msgspec.structs.replace(manifest, format=checkpoint_files.FORMAT + 1)
    (folder / checkpoint_files.MANIFEST).write_bytes(msgspec.json.encode(newer))
    with pytest.raises(InvalidRequest, match="has format 2, of a newer version of the server"):
        await checkpoints.open(PATH)


async def test_a_save_does_not_begin_while_there_is_no_room(database, tmp_path):
    storage = Storage(tmp_path, "100%")
    checkpoints = await open_checkpoints(database, tmp_path / "checkpoints", "m", storage)
    storage.measure()
    storage._has_no_room = True
    with pytest.raises(OSError, match="too little room") as full:
        await checkpoints.begin(PATH, SaveOptions())
    assert is_outage(full.value)
    storage._min_free = "0"
    storage.measure()
    await checkpoints.begin(PATH, SaveOptions())


async def test_a_missing_file_is_named(checkpoints):
    await save(checkpoints)
    folder, _ = await checkpoints.open(PATH)
    (folder / "inner" / "shard.bin").unlink()
    with pytest.raises(InvalidRequest, match=r"shard\.bin is missing"):
        await checkpoints.open(PATH)


async def test_a_checkpoint_of_another_base_model_names_both(checkpoints, database, tmp_path):
    await save(checkpoints)
    other = await open_checkpoints(database, tmp_path / "checkpoints", "Qwen/Qwen3-4B")
    with pytest.raises(InvalidRequest, match=r"Qwen/Qwen3-0\.6B.*Qwen/Qwen3-4B"):
        await other.open(PATH)


async def test_a_deleted_checkpoint_is_gone_from_disk(checkpoints):
    await save(checkpoints)
    folder, _ = await checkpoints.open(PATH)
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


@pytest.mark.parametrize("ttl_seconds", [0, -1, 3599, 10**12])
async def test_an_impossible_time_to_live_is_refused(checkpoints, ttl_seconds):
    with pytest.raises(InvalidRequest, match="ttl_seconds"):
        await checkpoints.begin(PATH, SaveOptions(ttl_seconds=ttl_seconds))


async def test_rows_follow_the_folders_after_a_crash(checkpoints, database, tmp_path):
    lost, kept = PATH._replace(name="lost"), PATH._replace(name="kept")
    await save(checkpoints, lost)
    await save(checkpoints, kept)
    folder, _ = await checkpoints.open(lost)
    moved = PATH._replace(name="moved")
    folder.rename(folder.with_name("moved"))

    restarted = await open_checkpoints(database, tmp_path / "checkpoints", "Qwen/Qwen3-0.6B")

    await restarted.open(kept)
    await restarted.open(moved)
    with pytest.raises(NotFound):
        await restarted.find(lost)


async def test_a_checkpoint_that_was_whole_when_the_server_died_is_kept(checkpoints, database, tmp_path):
    await save(checkpoints)
    folder, _ = await checkpoints.open(PATH)
    folder.rename(folder.with_name(".step-1.partial"))
    restarted = await open_checkpoints(database, tmp_path / "checkpoints", "Qwen/Qwen3-0.6B")
    await restarted.open(PATH)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "a\\b", "a\0b", "a\nb", "x" * 201, "ü" * 101]
)
def test_names_that_could_leave_their_folder_are_refused(name):
    with pytest.raises(InvalidRequest, match="a checkpoint"):
        checkpoint_files.check_name("a checkpoint", name)


@pytest.mark.parametrize("name", ["step-000001", "lr=1e-4 (final)", "ü" * 100, "a..b", "x.partial"])
def test_other_names_are_taken(name):
    checkpoint_files.check_name("a checkpoint", name)


def test_a_path_is_read_and_written():
    text = "tinker://s:train:0/sampler_weights/n"
    assert checkpoint_files.parse(text) == CheckpointPath("s:train:0", "sampler_weights", "n")
    assert str(checkpoint_files.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "n",
        "tinker://r/n",
        "tinker://r/other/n",
        "http://r/weights/n",
        "tinker://../weights/n",
        "tinker://r/weights/a/b",
    ],
)
def test_anything_else_is_no_path(text):
    with pytest.raises(InvalidRequest):
        checkpoint_files.parse(text)
