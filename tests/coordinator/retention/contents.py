"""What the tests of the reaper put into a server's database and folders."""

import os
from itertools import count

from sqlalchemy import insert, select

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.runtime.folder_names import folder_name
from spmd_tx.coordinator.storage.tables import (
    ModelRow,
    RequestRow,
    SamplerRow,
    SessionRow,
    SnapshotRow,
)

HOUR = 3600.0

MODEL = "s:train:0"

LIMITS = ServerConfig(
    base_model="",
    keep_results_hours=2,
    keep_versions_hours=1,
    keep_audit_days=30,
    keep_metrics_days=90,
    max_compilation_cache="1000",
)


async def add(database, table, *rows):
    async with database.transaction() as db:
        for row in rows:
            await db.execute(insert(table).values(row))


async def add_session(database, id="s", ended_at=None):
    await add(database, SessionRow, {"id": id, "created_at": 0.0, "tags": [], "ended_at": ended_at})


async def add_model(database, id=MODEL, session_id="s"):
    adapter = {"rank": 4, "alpha": 32.0, "train_attn": True, "train_mlp": True, "train_unembed": True}
    row = {"id": id, "session_id": session_id, "base_model": "b", "created_at": 0.0}
    await add(database, ModelRow, row | adapter)


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


async def add_sampler(database, number, created_at, session_id="s", **values):
    id = f"{session_id}:sample:{number}"
    row = {"id": id, "session_id": session_id, "base_model": "b", "created_at": created_at}
    await add(database, SamplerRow, row | values)
    return id


def version_folder(data_dir, version):
    folder = data_dir / "versions" / folder_name(version)
    folder.mkdir(parents=True)
    (folder / "adapter.safetensors").write_bytes(b"w" * 50)
    os.utime(folder, (1, 1))
    return folder


def add_note(data_dir, kind, name, used_at, session="s"):
    path = data_dir / kind / session / f"{name}.zst"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"n" * 10)
    os.utime(path, (used_at, used_at))
    os.utime(path.parent, (0, 0))
    return path
