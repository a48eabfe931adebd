import asyncio

import pytest

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.requests.payload_files import PayloadFiles
from spmd_tx.coordinator.retention import reaper
from spmd_tx.coordinator.retention.reaper import Reaped
from spmd_tx.coordinator.storage.database import open_database
from spmd_tx.errors import StartError
from tests.support.databases import make_database

LIMITS = ServerConfig(base_model="", keep_results_hours=0, keep_versions_hours=0, max_compilation_cache="0")


@pytest.fixture
def data_dir(tmp_path):
    """Make a directory with a payload file that no row refers to."""
    files = PayloadFiles(tmp_path / "payloads")
    files.write([b"a large body" * 100])
    files.close()
    return tmp_path


async def test_what_would_go_is_told_and_then_goes(data_dir):
    make_database(data_dir)
    (told,) = await reaper.collect(data_dir, None, LIMITS, dry_run=True)
    assert (told.kind, told.count) == ("payload files", 1)
    assert list((data_dir / "payloads").glob("*.zst")) != []
    assert await reaper.collect(data_dir, None, LIMITS, dry_run=False) == [told]
    assert list((data_dir / "payloads").glob("*.zst")) == []


async def test_a_running_server_is_left_alone(data_dir):
    make_database(data_dir)
    database = await open_database(None, data_dir)
    with pytest.raises(StartError, match="in use by another running server"):
        await reaper.collect(data_dir, None, LIMITS, dry_run=True)
    await database.close()
    files = await asyncio.to_thread(PayloadFiles, data_dir / "payloads")
    with pytest.raises(StartError, match="in use by another running server"):
        await reaper.collect(data_dir, None, LIMITS, dry_run=True)
    files.close()


async def test_nothing_is_made_where_nothing_is(tmp_path):
    with pytest.raises(StartError, match="none does not exist"):
        await reaper.collect(tmp_path / "none", None, LIMITS, dry_run=True)
    assert not (tmp_path / "none").exists()


def test_the_table_has_a_row_for_each_kind_and_the_sum():
    rows = reaper.table([Reaped("finished requests", 12, 0), Reaped("snapshots", 3, 2048)]).splitlines()
    assert [row.split() for row in rows] == [
        ["count", "size"],
        ["finished", "requests", "12"],
        ["snapshots", "3", "2.0", "KiB"],
        ["in", "all", "2.0", "KiB"],
    ]
    assert len({len(row) for row in rows}) <= 2
