import sqlite3

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from spmd_tx.coordinator.database import open_database
from spmd_tx.coordinator.tables import Base
from spmd_tx.errors import StartError


async def test_migrations_make_the_tables_that_the_code_declares(database):
    def difference(session):
        context = MigrationContext.configure(session.connection(), opts={"compare_type": True})
        return compare_metadata(context, Base.metadata)

    async with database.reading() as db:
        assert await db.run_sync(difference) == []


async def test_opening_again_keeps_what_was_written(database_url, tmp_path):
    first = await open_database(database_url, tmp_path)
    async with first.transaction() as db:
        await db.execute(text("INSERT INTO sessions (id, created_at, tags) VALUES ('s', 1.0, '[]')"))
    await first.close()
    second = await open_database(database_url, tmp_path)
    async with second.reading() as db:
        assert await db.scalar(text("SELECT id FROM sessions")) == "s"
    await second.close()


async def test_a_failed_transaction_leaves_nothing_behind(database):
    async def write_and_fail():
        async with database.transaction() as db:
            await db.execute(text("INSERT INTO sessions (id, created_at, tags) VALUES ('s', 1.0, '[]')"))
            raise LookupError

    with pytest.raises(LookupError):
        await write_and_fail()
    async with database.reading() as db:
        assert await db.scalar(text("SELECT count(*) FROM sessions")) == 0


async def test_sqlite_commits_are_on_disk_when_they_return(tmp_path):
    database = await open_database(None, tmp_path)
    async with database.reading() as db:
        assert await db.scalar(text("PRAGMA journal_mode")) == "wal"
        assert await db.scalar(text("PRAGMA synchronous")) == 2  # FULL
    await database.close()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://alice:secret@127.0.0.1:1/tinker",
        "sqlite:////nonexistent/directory/spmd_tx.db",
        "mysql://alice:secret@host/tinker",
        "alice:secret",
    ],
)
async def test_an_unreachable_database_is_named_without_its_password(url, tmp_path):
    with pytest.raises(StartError, match="--database-url") as caught:
        await open_database(url, tmp_path)
    assert "secret" not in str(caught.value)


async def test_a_database_of_a_newer_version_is_left_alone(tmp_path):
    await (await open_database(None, tmp_path)).close()
    with sqlite3.connect(tmp_path / "spmd_tx.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with pytest.raises(StartError, match="another version"):
        await open_database(None, tmp_path)


async def test_a_data_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="--data-dir"):
        await open_database(None, tmp_path / "file" / "data")
