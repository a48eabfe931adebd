import asyncio
import json
import sqlite3
from contextlib import closing

import pytest

from spmd_tx.coordinator.checkpoints.snapshots import Snapshots
from spmd_tx.coordinator.requests.records import Finished
from spmd_tx.coordinator.retention.backup import back_up
from spmd_tx.coordinator.runtime.folder_names import folder_name
from spmd_tx.coordinator.storage.database import open_database
from spmd_tx.errors import StartError
from spmd_tx.protocol.commands import AdapterSpec
from tests.support.databases import make_database

MODEL = "s:train:0"
RESULT = Finished("x", b"a large result" * 1000)  # in a file, while the requests are in their rows


def snapshots_of(database, data_dir):
    return Snapshots(database, data_dir / "snapshots", 60.0, clock=lambda: 0.0)


async def take_snapshot(database, data_dir, seq_id):
    snapshots = snapshots_of(database, data_dir)
    folder = snapshots.place(MODEL, seq_id)
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"w" * 1000)
    await snapshots.record(MODEL, seq_id, folder, AdapterSpec(rank=4))
    return folder


@pytest.fixture
async def data_dir(tmp_path, running_queue):
    """Of a server that runs while the test does."""
    data_dir = tmp_path / "data"
    make_database(data_dir)
    database = await open_database(None, data_dir)
    async with running_queue(database, data_dir) as queue:
        executed = await queue.submit("create_model", MODEL, 0, "s", b"created")
        queue.resolve(executed, RESULT)
        await queue.submit("optim_step", MODEL, 1, "s", b"unfinished")
        await queue.flush()
        for seq_id in (3, 4):
            await take_snapshot(database, data_dir, seq_id)
        (data_dir / "checkpoints" / "run" / "weights" / "name").mkdir(parents=True)
        (data_dir / "checkpoints" / "run" / "weights" / "name" / "checkpoint.json").write_text("{}")
        yield data_dir
    await database.close()


async def test_a_copy_of_a_running_server_is_a_data_directory(data_dir, tmp_path, running_queue, no_cache):
    half = data_dir / "snapshots" / folder_name(MODEL) / "5"
    half.mkdir()
    (half / "weights").write_bytes(b"half")
    (data_dir / "checkpoints" / "run" / "weights" / ".other.partial").mkdir()
    (data_dir / "checkpoints" / "run" / "weights" / ".other.partial" / "x").write_bytes(b"half")
    size = await asyncio.to_thread(back_up, data_dir, tmp_path / "copy")

    copy = tmp_path / "copy"
    assert size == sum(path.stat().st_size for path in copy.rglob("*") if path.is_file())
    database = await open_database(None, copy)
    async with running_queue(database, copy) as queue:
        (unfinished,) = queue.unfinished()
        assert await queue.payload(unfinished) == b"unfinished"
        (created,) = (await queue.history(MODEL, after=-1)).executed
        assert await queue.wait(created.request.id, timeout=0) == RESULT
        found, problem = await snapshots_of(database, copy).newest(MODEL, before=None)
        assert problem is None
        assert found.path == copy / "snapshots" / folder_name(MODEL) / "4"
    await database.close()
    assert not (copy / "snapshots" / folder_name(MODEL) / "5").exists()
    assert [path.name for path in (copy / "checkpoints" / "run" / "weights").iterdir()] == ["name"]


async def test_files_that_are_deleted_while_they_are_copied_do_not_matter(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.copy2", vanishing("routing"))
    (data_dir / "routing" / "s").mkdir(parents=True)
    (data_dir / "routing" / "s" / "r.zst").write_bytes(b"x")
    assert back_up(data_dir, tmp_path / "copy")


async def test_a_copy_without_something_that_is_needed_is_told(data_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.copy2", vanishing("payloads"))
    with pytest.raises(
        StartError, match=r"lacks files that the database refers to \(payloads/0000.*try again"
    ):
        back_up(data_dir, tmp_path / "copy")


def vanishing(folder):
    """As shutil.copy2, but files of one folder are deleted before they are copied."""
    import shutil

    copy2 = shutil.copy2

    def copy(source, target):
        if folder in source.parts:
            source.unlink()
        return copy2(source, target)

    return copy


@pytest.mark.parametrize("place", ["file", "a" * 300])
def test_a_place_that_cannot_be_written_is_told(tmp_path, place):
    (tmp_path / "spmd_tx.db").touch()
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=f"{place}: .*name another folder"):
        back_up(tmp_path, tmp_path / place)


def test_only_a_data_directory_is_copied_and_only_to_an_empty_folder(tmp_path):
    with pytest.raises(StartError, match=r"holds no spmd_tx\.db.*pg_dump"):
        back_up(tmp_path / "none", tmp_path / "copy")
    (tmp_path / "data").mkdir()
    with closing(sqlite3.connect(tmp_path / "data" / "spmd_tx.db")):
        (tmp_path / "data" / "spmd_tx.db").touch()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text(json.dumps({}))
    with pytest.raises(StartError, match="full is not empty"):
        back_up(tmp_path / "data", tmp_path / "full")


async def test_a_copy_knows_the_base_models_and_their_meshes(data_dir, tmp_path):
    files = ("bases.json", "expert_lora", "base_model.json", "mesh.json", "groups/teacher/mesh.json")
    files += ("groups/rollouts/mesh.json", "groups/rollouts/0/program_uses.json")
    (data_dir / "groups" / "teacher" / "idle_adapters").mkdir(parents=True)
    (data_dir / "groups" / "teacher" / "idle_adapters" / "vector").write_bytes(b"of one generation")
    (data_dir / "groups" / "rollouts" / "0").mkdir(parents=True)
    for name in files:
        (data_dir / name).write_text(name)
    await asyncio.to_thread(back_up, data_dir, tmp_path / "copy")
    assert [(tmp_path / "copy" / name).read_text() for name in files] == list(files)
    assert not (tmp_path / "copy" / "groups" / "teacher" / "idle_adapters").exists()
