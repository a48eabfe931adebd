import time

from sqlalchemy import update

from spmd_tx.coordinator.checkpoints import snapshots as snapshots_module
from spmd_tx.coordinator.checkpoints.snapshots import Snapshots
from spmd_tx.coordinator.storage.folders import write_manifest
from spmd_tx.coordinator.storage.tables import (
    SnapshotRow,
)
from spmd_tx.protocol.commands import AdapterSpec
from tests.coordinator.retention.contents import MODEL, add_request, add_snapshot


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


async def test_large_snapshots_are_taken_less_often(database, tmp_path, monkeypatch):
    now = 0.0
    folder = await add_snapshot(database, tmp_path, 3)
    (folder / "weights").write_bytes(bytes(1000))
    monkeypatch.setattr(snapshots_module, "BYTES_PER_SECOND", 10.0)
    snapshots = Snapshots(database, tmp_path / "snapshots", 60.0, lambda: now)
    assert not snapshots.is_due(MODEL)
    now = 61.0
    assert snapshots.is_due(MODEL)
    await snapshots.record(MODEL, 3, folder, AdapterSpec(rank=0))
    now = 99.0
    assert not snapshots.is_due(MODEL)
    now = 110.0
    assert snapshots.is_due(MODEL)
