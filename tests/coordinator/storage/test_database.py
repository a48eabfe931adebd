import asyncio
import os
import shutil
import sqlite3
from contextlib import closing, contextmanager

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from spmd_tx.coordinator.storage import database as database_module
from spmd_tx.coordinator.storage import sqlite
from spmd_tx.coordinator.storage.database import open_beside, open_database
from spmd_tx.coordinator.storage.tables import Base
from spmd_tx.errors import DatabaseDamaged, DatabaseTaken, StartError
from tests.support.disks import fill, make_read_only


async def write(database, id):
    async with database.transaction() as db:
        await db.execute(
            text("INSERT INTO sessions (id, created_at, tags) VALUES (:id, 1.0, '[]')"), {"id": id}
        )


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


def newest_version():
    return max(path.stem[:4] for path in (database_module.MIGRATIONS / "versions").glob("0*.py"))


@pytest.fixture
def newer_version(monkeypatch, tmp_path_factory):
    """Context in which the code is of a version whose schema has one revision more, with these statements."""

    @contextmanager
    def newer_version(statements):
        migrations = tmp_path_factory.mktemp("newer") / "migrations"
        shutil.copytree(database_module.MIGRATIONS, migrations)
        head = newest_version()
        (migrations / "versions" / "9000_newer.py").write_text(
            f"revision, down_revision, branch_labels, depends_on = '9000', {head!r}, None, None\n"
            f"from alembic import op\n\n\ndef upgrade():\n    {statements}\n"
        )
        with monkeypatch.context() as patch:
            patch.setattr(database_module, "MIGRATIONS", migrations)
            yield

    return newer_version


async def test_a_newer_version_migrates_and_an_older_one_leaves_the_database_alone(
    database_url, tmp_path, newer_version
):
    await (await open_database(database_url, tmp_path)).close()
    with newer_version("op.execute('CREATE TABLE of_the_future (id INTEGER)')"):
        database = await open_database(database_url, tmp_path)
        async with database.reading() as db:
            assert await db.scalar(text("SELECT count(*) FROM of_the_future")) == 0
    with pytest.raises(StartError, match="in use by another running server"):
        await open_database(database_url, tmp_path)
    await database.close()
    with pytest.raises(StartError, match=r"newer version of spmd_tx.*'9000'.*start that version"):
        await open_database(database_url, tmp_path)
    with newer_version("pass"):  # the refusal has changed nothing
        database = await open_database(database_url, tmp_path)
    async with database.transaction() as db:
        await db.execute(text("DROP TABLE of_the_future"))
        await db.execute(text(f"UPDATE alembic_version SET version_num = '{newest_version()}'"))
    await database.close()


async def test_a_migration_that_is_interrupted_leaves_nothing_behind(database_url, tmp_path, newer_version):
    statements = "op.execute('CREATE TABLE half_done (id INTEGER)'); raise LookupError"
    with newer_version(statements), pytest.raises(LookupError):
        await open_database(database_url, tmp_path)
    database = await open_database(database_url, tmp_path)
    async with database.reading() as db:
        with pytest.raises(SQLAlchemyError, match="half_done"):
            await db.execute(text("SELECT * FROM half_done"))
    await database.close()


@pytest.fixture
def fast_refusal(monkeypatch):
    monkeypatch.setattr(database_module, "LOCK_SECONDS", 0.0)


async def test_a_second_server_is_refused_and_told_of_the_first(
    fast_refusal, database, database_url, tmp_path
):
    with pytest.raises(StartError, match=rf"in use by another running server \(.*process {os.getpid()} on"):
        await open_database(database_url, tmp_path)
    await database.close()
    await (await open_database(database_url, tmp_path)).close()


async def test_a_second_server_on_a_file_named_by_url_is_refused_too(fast_refusal, tmp_path):
    url = f"sqlite:///{tmp_path}/requests.db"
    database = await open_database(url, tmp_path / "one")
    with pytest.raises(StartError, match="choose another --data-dir or --database-url"):
        await open_database(url, tmp_path / "two")
    await database.close()


def overwrite_pages(file, pages, with_byte):
    content = bytearray(file.read_bytes())
    for page in pages:
        content[4096 * page : 4096 * (page + 1)] = bytes([with_byte]) * 4096
    file.write_bytes(content)


@pytest.mark.parametrize("page", [0, 5])
async def test_a_damaged_sqlite_file_is_refused_with_the_remedy(tmp_path, page):
    await (await open_database(None, tmp_path)).close()
    overwrite_pages(tmp_path / "spmd_tx.db", [page], 0xFF)
    with pytest.raises(StartError, match=r"spmd_tx\.db is damaged: .*restore the last backup"):
        await open_database(None, tmp_path)


async def test_a_database_that_is_damaged_while_it_is_used_is_not_used_any_more(tmp_path):
    database = await open_database(None, tmp_path)
    await write(database, "s")
    file = tmp_path / "spmd_tx.db"
    with closing(sqlite3.connect(file)) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    overwrite_pages(file, range(1, file.stat().st_size // 4096), 0xFF)
    await database._writer.dispose()  # so that pages are read again
    for _ in range(2):
        with pytest.raises(DatabaseDamaged, match="restore the last backup"):
            async with database.reading() as db:
                await db.execute(text("SELECT * FROM sessions"))
    with pytest.raises(DatabaseDamaged):
        async with database.transaction() as db:
            await db.execute(text("DELETE FROM sessions"))
    await database.close()


async def test_a_read_only_data_directory_is_refused_with_the_remedy(small_disk):
    make_read_only(small_disk)
    with pytest.raises(StartError, match=r"cannot open the database .*Read-only file system.*--data-dir"):
        await open_database(None, small_disk)
    with pytest.raises(StartError, match="cannot create --data-dir"):
        await open_database(None, small_disk / "data")


async def test_sqlite_goes_on_when_the_disk_has_room_again(small_disk):
    database = await open_database(None, small_disk)
    ballast = fill(small_disk)
    with pytest.raises(SQLAlchemyError, match="disk is full"):
        await write(database, "lost" * 10_000)
    ballast.unlink()
    await write(database, "kept")
    async with database.reading() as db:
        assert await db.scalar(text("SELECT count(*) FROM sessions WHERE id = 'kept'")) == 1
    await database.close()


async def test_a_locked_sqlite_file_fails_when_a_transaction_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite, "PRAGMAS", ("busy_timeout=10",))
    database = await open_database(None, tmp_path)
    with closing(sqlite3.connect(tmp_path / "spmd_tx.db")) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(SQLAlchemyError, match="locked"):
            async with database.transaction():
                pytest.fail("the block must not be entered")
    await write(database, "s")
    await database.close()


async def test_postgres_may_be_restarted_under_a_running_server(mortal_postgres, tmp_path, fast_refusal):
    url = mortal_postgres.get_uri()
    database = await open_database(url, tmp_path)
    await asyncio.to_thread(mortal_postgres.stop)
    for _ in range(3):
        with pytest.raises((SQLAlchemyError, OSError)):
            await write(database, "lost")
        with pytest.raises((SQLAlchemyError, OSError)):
            async with database.reading() as db:
                await db.execute(text("SELECT 1"))
    await asyncio.to_thread(mortal_postgres.start)
    await write(database, "kept")
    with pytest.raises(StartError, match="in use by another running server"):
        await open_database(url, tmp_path)
    await database.close()


async def test_commits_are_on_a_disk_even_if_postgres_is_told_not_to_wait(mortal_postgres, tmp_path):
    mortal_postgres.psql("ALTER DATABASE postgres SET synchronous_commit = off;")
    url = mortal_postgres.get_uri()
    server = await open_database(url, tmp_path)
    command = await open_beside(url, tmp_path)
    try:
        for database in (server, command):
            async with database.transaction() as db:
                assert await db.scalar(text("SHOW synchronous_commit")) == "on"
    finally:
        await command.close()
        await server.close()
        mortal_postgres.psql("ALTER DATABASE postgres RESET synchronous_commit;")


async def test_whoever_loses_the_lock_cannot_write_any_more(mortal_postgres, tmp_path, fast_refusal):
    url = mortal_postgres.get_uri()
    first = await open_database(url, tmp_path)
    mortal_postgres.psql("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory';")
    second = await open_database(url, tmp_path)
    for _ in range(2):
        with pytest.raises(DatabaseTaken, match="in use by another running server"):
            await write(first, "stale")
    await write(second, "fresh")
    await first.close()
    await second.close()


async def test_a_data_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="--data-dir"):
        await open_database(None, tmp_path / "file" / "data")


@pytest.mark.parametrize(
    "url, told",
    [
        ("postgresql://u:secret@localhost:abc/x", "is not a URL"),
        ("postgresql://u:secret@127.0.0.1:1/x?sslmod=on", "has sslmod behind"),
    ],
)
async def test_a_url_that_is_misspelt_is_told_without_its_password(url, told, tmp_path):
    for opened in (open_database, open_beside):
        with pytest.raises(StartError, match=told) as caught:
            await opened(url, tmp_path)
        assert "secret" not in str(caught.value)
