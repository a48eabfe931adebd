"""The data of the first version, opened by this one."""

import pytest
import zstandard
from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine, select, text

from spmd_tx.coordinator.checkpoints import files
from spmd_tx.coordinator.checkpoints.catalog import open_checkpoints
from spmd_tx.coordinator.checkpoints.checkpoint_base import CheckpointBase
from spmd_tx.coordinator.checkpoints.store import LocalStore
from spmd_tx.coordinator.requests.queue import open_queue
from spmd_tx.coordinator.requests.records import Finished
from spmd_tx.coordinator.storage.database import MIGRATIONS, open_database
from spmd_tx.coordinator.storage.disk import DiskGuard
from spmd_tx.coordinator.storage.tables import CheckpointRow, ModelRow
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath

ROWS = """
    INSERT INTO sessions (id, created_at, tags) VALUES ('s', 1.0, '[]');
    INSERT INTO models (id, session_id, base_model, rank, alpha, train_attn, train_mlp, train_unembed,
        created_at, is_lost) VALUES ('s:train:0', 's', 'b', 4, 32.0, TRUE, TRUE, TRUE, 1.0, FALSE);
    INSERT INTO samplers (id, session_id, base_model, created_at, is_lost)
        VALUES ('s:sample:0', 's', 'b', 1.0, FALSE);
    INSERT INTO requests (number, id, kind, line, seq_id, session_id, created_at, payload_file,
        payload_offset, payload_length, finished_at, content_type, result_file, result_offset, result_length)
        VALUES (1, 'answered', 'create_model', 's:train:0', 0, 's', 1.0, 0, 0, {size}, 2.0, 'x', 0, 0,
        {size});
    INSERT INTO requests (number, id, kind, line, seq_id, session_id, created_at, payload_file,
        payload_offset, payload_length)
        VALUES (2, 'open', 'optim_step', 's:train:0', 1, 's', 1.0, 0, 0, {size});
"""


@pytest.fixture
def first_version(tmp_path):
    """Data directory and database as the first version has left them."""
    frame = zstandard.ZstdCompressor(level=1).compress(b"a body")
    (tmp_path / "payloads").mkdir()
    (tmp_path / "payloads" / "000000000000.zst").write_bytes(frame)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    engine = create_engine(f"sqlite:///{tmp_path}/spmd_tx.db")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "0001")
        for statement in ROWS.format(size=len(frame)).split(";"):
            if statement.strip():
                connection.execute(text(statement))
    engine.dispose()
    return tmp_path


async def test_results_of_the_first_version_are_answered_and_what_it_left_is_taken_up(first_version):
    database = await open_database(None, first_version)
    queue = await open_queue(database, first_version)
    assert await queue.wait("answered", timeout=0) == Finished("x", b"a body")
    (unfinished,) = queue.unfinished()
    assert (unfinished.id, unfinished.line) == ("open", "s:train:0")
    assert await queue.payload(unfinished) == b"a body"
    history = await queue.history("s:train:0", after=-1)
    assert "made by an earlier version of this server" in history.refusal
    queue.close()
    await database.close()


async def test_checkpoints_of_the_first_version_are_listed_and_read(first_version):
    path = CheckpointPath("s:train:0", "weights", "step-1")
    folder = path.folder(first_version / "checkpoints")
    folder.mkdir(parents=True)
    (folder / "shard.bin").write_bytes(b"weights")
    (folder / files.MANIFEST).write_text(
        '{"run_id":"s:train:0","base_model":"b","rank":4,"alpha":32.0,"train_attn":true,"train_mlp":true,'
        '"train_unembed":true,"created_at":1.0,"expires_at":null,"user_metadata":null,'
        '"files":{"shard.bin":7},"saved_by":null,"format":1}'
    )
    database = await open_database(None, first_version)
    checkpoints = await open_checkpoints(
        database, LocalStore(first_version / "checkpoints"), DiskGuard(first_version / "checkpoints")
    )
    assert (await checkpoints.open(path, CheckpointBase(("b",)))).folder == folder
    await database.close()


TO_0015 = """
    ALTER TABLE checkpoints DROP COLUMN seq_id;
    ALTER TABLE checkpoints DROP COLUMN is_best;
    INSERT INTO checkpoints (run_id, kind, name, size_bytes, is_public, created_at, owner)
        VALUES ('s:train:0', 'weights', 'early', 7, FALSE, 1.0, 'local');
    ALTER TABLE models DROP COLUMN optimizer;
    ALTER TABLE models DROP COLUMN name;
    ALTER TABLE models DROP COLUMN run_group;
    ALTER TABLE models DROP COLUMN archived_at;
    INSERT INTO models (id, session_id, base_model, rank, alpha, train_attn, train_mlp, train_unembed,
        created_at) VALUES ('s:train:0', 's', 'b', 4, 32.0, TRUE, TRUE, TRUE, 1.0);
    ALTER TABLE usage DROP COLUMN images;
    DROP TABLE request_images;
    DROP TABLE images;
    DROP TABLE turns;
    DROP TABLE trajectories;
    ALTER TABLE requests DROP COLUMN base;
    ALTER TABLE past_requests DROP COLUMN base;
    UPDATE alembic_version SET version_num = '0015';
    INSERT INTO requests (number, id, kind, line, seq_id, session_id, created_at, payload_body,
        payload_length, executed, losses, losses_by_command, coordinator_losses)
        VALUES (7, 'open', 'optim_step', 's:train:0', 1, 's', 1.0, {body}, 1, FALSE, 0, 0, 0);
    INSERT INTO past_requests (number, kind, line, seq_id, session_id, created_at, finished_at)
        VALUES (6, 'sample', 's:sample:0', 1, 's', 1.0, 2.0)
"""


async def test_requests_of_the_version_without_bases_go_on_and_are_of_the_first_one(database_url, tmp_path):
    earlier = await open_database(database_url, tmp_path)
    async with earlier.transaction() as db:
        body = "'\\x31'" if database_url else "x'31'"
        for statement in TO_0015.format(body=body).split(";"):
            await db.execute(text(statement))
    await earlier.close()
    database = await open_database(database_url, tmp_path)
    queue = await open_queue(database, tmp_path)
    (unfinished,) = queue.unfinished()
    assert (unfinished.id, unfinished.base) == ("open", None)
    assert await queue.payload(unfinished) == b"1"
    async with database.reading() as db:
        assert (await db.execute(text("SELECT number, base FROM past_requests"))).one() == (6, None)
        model = await db.get_one(ModelRow, "s:train:0")
        checkpoint = (await db.scalars(select(CheckpointRow))).one()
    assert (model.rank, model.name, model.run_group, model.archived_at) == (4, None, None, None)
    assert model.optimizer == "adamw"
    assert (checkpoint.name, checkpoint.seq_id, checkpoint.is_best) == ("early", None, False)
    queue.close()
    await database.close()
