"""Opens the database, SQLite beside the data or PostgreSQL by URL, migrates it, and runs transactions."""

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, OperationalError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only

from spmd_tx.coordinator.storage import postgres, sqlite
from spmd_tx.errors import DatabaseDamaged, DatabaseTaken, StartError

_DRIVERS = {
    "sqlite": "sqlite+aiosqlite",
    "postgresql": "postgresql+asyncpg",
    "postgres": "postgresql+asyncpg",
}

MIGRATIONS = Path(__file__).parent / "migrations"
LOCK_SECONDS = 5.0  # until the connections of a server that was just killed have ended

Result = TypeVar("Result")


class Aside(Protocol):
    """Runs blocking work in the middle of a transaction without blocking the event loop."""

    def __call__(self, work: Callable[[], Result]) -> Result: ...


class Database:
    """Runs reads side by side at any time, and writes as transactions, one at a time.

    While the database is unreachable, methods raise an SQLAlchemyError or an OSError, and may be tried again.
    DatabaseDamaged and DatabaseTaken are final.
    """

    def __init__(
        self,
        writer: AsyncEngine,
        reader: AsyncEngine,
        held: AsyncExitStack,
        quick_writer: Engine | None = None,
    ) -> None:
        """``quick_writer`` is for transactions that run in one thread from begin to end."""
        self.end: StartError | None = None  # why this database must not be used any more
        self._writer = writer
        self._reader = reader
        self._held = held
        self._writing = asyncio.Lock()
        self._quick_writer = quick_writer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="database")

    @property
    def is_sqlite(self) -> bool:
        return self._writer.dialect.name == "sqlite"

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncSession]:
        """Commits when the block ends, and rolls back when it raises."""
        async with self._writing, self._session(self._writer) as db, db.begin():
            await _connect(db)
            if self.is_sqlite:
                await db.execute(text("BEGIN IMMEDIATE"))  # fails at once if it cannot be written to
            yield db

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncSession]:
        async with self._session(self._reader) as db:
            await _connect(db)
            yield db

    async def write(self, work: Callable[[Session, Aside], Result]) -> Result:
        """Do work in a transaction that is committed when the work returns. It runs to its end if cancelled.

        Meant for frequent writes: with SQLite they happen in one thread, because a busy loop takes longer to
        wait for a statement than SQLite takes to execute it.
        """
        quick_writer = self._quick_writer
        if quick_writer is None:
            async with self.transaction() as db:
                return await db.run_sync(lambda session: work(session, _in_thread))
        async with self._writing:
            loop = asyncio.get_running_loop()
            return await _finished(loop.run_in_executor(self._thread, self._write, quick_writer, work))

    def _write(self, engine: Engine, work: Callable[[Session, Aside], Result]) -> Result:
        with self._guard(engine), Session(engine, expire_on_commit=False) as db, db.begin():
            db.connection().exec_driver_sql("BEGIN IMMEDIATE")
            return work(db, _at_once)

    async def close(self) -> None:
        self._thread.shutdown()
        await self._held.aclose()

    @asynccontextmanager
    async def _session(self, engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
        with self._guard(engine):
            async with AsyncSession(engine, expire_on_commit=False) as db:
                yield db

    @contextmanager
    def _guard(self, engine: AsyncEngine | Engine) -> Iterator[None]:
        """Remember an error after which the database must not be used, and raise it from then on."""
        if self.end is not None:
            raise self.end
        try:
            yield
        except SQLAlchemyError as error:
            original = getattr(error, "orig", None)
            if not sqlite.is_damage(original):
                raise
            self.end = sqlite.damaged(str(engine.url.database), str(original))
            raise self.end from error
        except (DatabaseDamaged, DatabaseTaken) as error:
            self.end = error
            raise


async def open_database(database_url: str | None, data_dir: Path) -> Database:
    """Connect, and bring the tables up to date. Raises StartError when either is impossible."""
    url, quick_writer = _resolve(database_url, data_dir), None
    async with AsyncExitStack() as stack:
        if url.get_backend_name() == "sqlite":
            if url.database and url.database != ":memory:":
                stack.callback((await asyncio.to_thread(sqlite.lock, Path(url.database))).close)
                quick_writer = sqlite.make_quick_engine(url)
                stack.callback(quick_writer.dispose)
            writer = reader = sqlite.make_engine(url)
        else:
            writer, reader = postgres.make_engines(url)
        stack.push_async_callback(writer.dispose)
        stack.push_async_callback(reader.dispose)
        await _bring_up_to_date(writer, _public(url))
        return Database(writer, reader, stack.pop_all(), quick_writer)


def check_exists(database_url: str | None, data_dir: Path) -> None:
    """Refuse to create a database where one is only looked at. Raises StartError. Knows of SQLite's alone."""
    url = _located(database_url, data_dir)
    if url.get_backend_name() == "sqlite" and not os.path.lexists(url.database or ""):
        raise StartError(
            f"there is no database {url.database or 'in memory'}; name the --data-dir of the server, and its "
            "--database-url if it has one"
        )


async def open_beside(database_url: str | None, data_dir: Path) -> Database:
    """Connect without locking the database, so that a server may be running.

    If no server runs, tables are created or migrated. Raises StartError as ``open_database`` does.
    """
    url = _resolve(database_url, data_dir)
    async with AsyncExitStack() as stack:
        if url.get_backend_name() == "sqlite":
            await asyncio.to_thread(sqlite.check_readable, Path(url.database or ":memory:"))
            engine = sqlite.make_engine(url)
        else:
            engine = postgres.make_engine_beside(url)
        stack.push_async_callback(engine.dispose)
        try:
            async with engine.connect() as connection:
                is_current = await connection.run_sync(_is_current)
        except (OSError, SQLAlchemyError, *postgres.CANNOT_CONNECT) as error:
            raise _cannot_open(_public(url), error) from error
        if not is_current:
            await (await open_database(database_url, data_dir)).close()
        return Database(engine, engine, stack.pop_all())


async def in_database(
    database_url: str | None,
    data_dir: Path,
    work: Callable[[AsyncSession], Awaitable[Result]],
    *,
    only_reads: bool = False,
) -> Result:
    """Do work in a transaction on the database of a server that may be running. Raises StartError."""
    database = await open_beside(database_url, data_dir)
    try:
        async with database.reading() if only_reads else database.transaction() as db:
            return await work(db)
    except (OSError, SQLAlchemyError) as error:
        raise StartError(f"the database does not answer: {error}; try again") from error
    finally:
        await database.close()


async def _bring_up_to_date(engine: AsyncEngine, url: str) -> None:
    """Migrate. Waits for a lock that a server which was just killed may still seem to hold."""
    deadline = asyncio.get_running_loop().time() + LOCK_SECONDS
    while True:
        try:
            async with engine.begin() as connection:
                await connection.run_sync(_migrate)
            return
        except CommandError as error:
            raise StartError(
                f"the database {url} was written by a newer version of spmd_tx ({error}); "
                "start that version, or choose another --database-url or --data-dir"
            ) from error
        except (DatabaseTaken, TimeoutError) as error:
            if asyncio.get_running_loop().time() > deadline:
                raise _cannot_open(url, error) if isinstance(error, TimeoutError) else error from error
        except (OSError, SQLAlchemyError, *postgres.CANNOT_CONNECT) as error:
            raise _cannot_open(url, error) from error
        await asyncio.sleep(0.2)


def _cannot_open(url: str, error: BaseException) -> StartError:
    reason = getattr(error, "orig", None) or error
    return StartError(
        f"cannot open the database {url}: {reason}; check --database-url and that it is running"
    )


async def _finished(work: asyncio.Future[Result]) -> Result:
    """Wait for the end, even when cancelled: nobody else may write before it."""
    is_cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        raise asyncio.CancelledError
    return work.result()


def _at_once(work: Callable[[], Result]) -> Result:
    return work()


def _in_thread(work: Callable[[], Result]) -> Result:
    return await_only(asyncio.to_thread(work))


async def _connect(db: AsyncSession) -> None:
    """Connect now, so that every failure to do so is an OSError or SQLAlchemyError."""
    try:
        await db.connection()
    except postgres.CANNOT_CONNECT as error:
        raise OperationalError("connecting", None, error) from error


def _resolve(database_url: str | None, data_dir: Path) -> URL:
    if database_url is None:
        make_directory(data_dir)
    return _located(database_url, data_dir)


def _located(database_url: str | None, data_dir: Path) -> URL:
    if database_url is None:
        return URL.create(_DRIVERS["sqlite"], database=str(data_dir / "spmd_tx.db"))
    try:
        url = make_url(database_url)
    except (ArgumentError, ValueError):  # the latter of a port
        raise StartError(
            "--database-url is not a URL; use postgresql://USER:PASSWORD@HOST/NAME or sqlite:///FILE"
        ) from None
    backend = url.get_backend_name()
    if backend not in _DRIVERS:
        raise StartError(f"--database-url names {backend!r}; use postgresql:// or sqlite:///")
    url = url.set(drivername=_DRIVERS[backend])
    if backend != "sqlite":
        postgres.check_options(url)
    return url


def _public(url: URL) -> str:
    return url.render_as_string(hide_password=True)


def make_directory(data_dir: Path) -> None:
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"cannot create --data-dir {data_dir}: {error.strerror}; choose another") from error


def _migrate(connection: Connection) -> None:
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # an interrupted migration leaves nothing behind
    if _is_current(connection):
        return
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _is_current(connection: Connection) -> bool:
    """Whether the tables are those of this version."""
    return MigrationContext.configure(connection).get_current_revision() == _newest_in(MIGRATIONS)


@functools.cache
def _newest_in(migrations: Path) -> str | None:
    """Read them all to find the last."""
    return ScriptDirectory(str(migrations)).get_current_head()
