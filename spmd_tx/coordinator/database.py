"""The connection to the database: SQLite beside the data, or PostgreSQL by URL. Migrated when opened."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import Connection, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine

from spmd_tx.errors import StartError

_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "postgresql": "postgresql+asyncpg",
    "postgres": "postgresql+asyncpg",
}

# FULL: a commit is on the disk when it returns. The timeout is for a user who looks in with another tool.
_SQLITE_PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=10000")


class Database:
    """Reads may run at any time and side by side; writes are transactions, one at a time."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._writing = asyncio.Lock()

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """Committed when the block ends, rolled back when it raises."""
        async with self._writing, AsyncSession(self._engine, expire_on_commit=False) as db, db.begin():
            yield db

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        async with AsyncSession(self._engine, expire_on_commit=False) as db:
            yield db

    async def close(self) -> None:
        await self._engine.dispose()


async def open_database(database_url: str | None, data_dir: Path) -> Database:
    """Connect, and bring the tables up to date. Raises StartError when either is impossible."""
    url = _resolve(database_url, data_dir)
    if url.get_backend_name() == "sqlite":
        _check_file(url)
    engine = create_async_engine(url)
    if url.get_backend_name() == "sqlite":
        event.listen(engine.sync_engine, "connect", _set_pragmas)
    try:
        async with engine.begin() as connection:
            await connection.run_sync(_migrate)
    except CommandError as error:
        await engine.dispose()
        raise StartError(
            f"the database {_public(url)} was written by another version of spmd_tx ({error}); "
            "start that version, or choose another --database-url or --data-dir"
        ) from error
    except (OSError, SQLAlchemyError) as error:
        await engine.dispose()
        reason = getattr(error, "orig", None) or error
        raise StartError(
            f"cannot open the database {_public(url)}: {reason}; check --database-url and that it is running"
        ) from error
    return Database(engine)


def _resolve(database_url: str | None, data_dir: Path) -> URL:
    if database_url is None:
        _make_directory(data_dir)
        return URL.create(_DRIVERS["sqlite"], database=str(data_dir / "spmd_tx.db"))
    try:
        url = make_url(database_url)
    except ArgumentError:
        raise StartError(
            "--database-url is no URL; use postgresql://USER:PASSWORD@HOST/NAME or sqlite:///FILE"
        ) from None
    backend = url.get_backend_name()
    if backend not in _DRIVERS:
        raise StartError(f"--database-url names {backend!r}; use postgresql:// or sqlite:///")
    return url.set(drivername=_DRIVERS[backend])


def _public(url: URL) -> str:
    return url.render_as_string(hide_password=True)


def _make_directory(data_dir: Path) -> None:
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"cannot create --data-dir {data_dir}: {error.strerror}; choose another") from error


def _check_file(url: URL) -> None:
    """Fail early: an aiosqlite connection that cannot be opened leaves a thread behind."""
    try:
        with closing(sqlite3.connect(url.database or ":memory:")) as connection:
            connection.execute("PRAGMA schema_version")
    except sqlite3.Error as error:
        raise StartError(
            f"cannot open the database {_public(url)}: {error}; check --database-url or --data-dir"
        ) from error


def _set_pragmas(connection: object, _: object) -> None:
    cursor = connection.cursor()  # pyright: ignore[reportAttributeAccessIssue]
    for pragma in _SQLITE_PRAGMAS:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _migrate(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
