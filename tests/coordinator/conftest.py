import asyncio
import functools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from litestar import Litestar
from tokenizers import Tokenizer

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.bases.bases import Bases
from spmd_tx.coordinator.bases.health import GroupHealth, GroupRole, ServerHealth
from spmd_tx.coordinator.bases.served_base import ServedBase, open_base
from spmd_tx.coordinator.http.app import make_app
from spmd_tx.coordinator.http.services import Backend, Services, Stores, open_services
from spmd_tx.coordinator.requests import payload_files
from spmd_tx.coordinator.requests import queue as request_queue
from spmd_tx.coordinator.requests.queue import RequestQueue, open_queue
from spmd_tx.coordinator.requests.records import Request
from spmd_tx.coordinator.retention.reaper import Reaped, Reaper
from spmd_tx.coordinator.sampling.progress import SampleProgress
from spmd_tx.coordinator.server.build import open_stores
from spmd_tx.coordinator.server.telemetry import Telemetry, open_telemetry
from spmd_tx.coordinator.storage.database import Database, open_database
from spmd_tx.coordinator.storage.tables import Base
from spmd_tx.coordinator.tenancy import keys
from spmd_tx.coordinator.text.model_text import LazyModelText, load_model_text
from spmd_tx.coordinator.text.served_model import ServedModel
from spmd_tx.demo import tiny_model
from spmd_tx.group_names import MAIN
from tests.coordinator.http.fake_scheduler import FakeScheduler
from tests.support.databases import make_database
from tests.support.model_shapes import TINY

MoreBases = Callable[[Path, AsyncExitStack], list[ServedBase]]
BASE_MODEL = "Qwen/Qwen3-0.6B"
TINY_MODEL = replace(TINY, max_positions=128)


@asynccontextmanager
async def run_queue(
    database: Database, data_dir: Path, announce: Callable[[Request], None] = lambda request: None
) -> AsyncIterator[RequestQueue]:
    """What the server does with a queue; leaving is stopping the server."""
    queue = await open_queue(database, data_dir)
    writer = asyncio.create_task(queue.run(announce))
    yield queue
    writer.cancel()
    await asyncio.wait([writer])
    queue.close()


ROUTES = Path(__file__).parent / "http"
ON_BOTH = ("test_isolation.py",)  # the one with most SQL of its own


@pytest.hookimpl(tryfirst=True)  # before items are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave tests of most routes on PostgreSQL to `make slow`; tests of what they call run on both."""
    for item in items:
        is_of_routes = ROUTES in item.path.parents or "services" in getattr(item, "fixturenames", ())
        if is_of_routes and item.path.name not in ON_BOTH:
            parameters = getattr(item, "callspec", None)
            if parameters is not None and parameters.params.get("database_url") == "postgresql":
                item.add_marker(pytest.mark.slow)


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    """Each test runs on both databases, on an empty one each time. None is the default: SQLite."""
    if request.param == "sqlite":
        make_database(tmp_path)
        return None
    server = request.getfixturevalue("postgres")
    server.psql(f"TRUNCATE {', '.join(Base.metadata.tables)};")
    return server.get_uri()


@pytest.fixture
async def database(database_url: str | None, tmp_path: Path) -> AsyncIterator[Database]:
    database = await open_database(database_url, tmp_path)
    yield database
    await database.close()


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for it before the queue: then every body is read from its file."""
    monkeypatch.setattr(request_queue, "PAYLOADS_BYTES", 0)
    monkeypatch.setattr(request_queue, "RESULTS_BYTES", 0)


@pytest.fixture
def all_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """No body is small enough for a row. Ask for it before the queue."""
    monkeypatch.setattr(payload_files, "SMALL_BYTES", -1)


@pytest.fixture
def running_queue() -> Callable[[Database, Path], AbstractAsyncContextManager[RequestQueue]]:
    """For tests that start and stop a queue themselves."""
    return run_queue


@pytest.fixture
def arrivals() -> list[Request]:
    """What the queue has announced."""
    return []


@pytest.fixture
async def queue(database: Database, tmp_path: Path, arrivals: list[Request]) -> AsyncIterator[RequestQueue]:
    async with run_queue(database, tmp_path, arrivals.append) as queue:
        yield queue


def running_group(name: str, base: str = BASE_MODEL, role: GroupRole = "train and sample") -> GroupHealth:
    """A group whose workers run commands."""
    group = GroupHealth(name, base, base, role, ready=True)
    group.record.busy = None
    return group


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    """Training it takes as long as many tests."""
    return tiny_model.train_tokenizer(TINY_MODEL.vocab_size, seed=0)


@pytest.fixture
def tokenizer() -> Tokenizer:
    return tiny_tokenizer()


def tiny_served_model(directory: Path) -> ServedModel:
    """With the files of its prompts, which are written when they are not there."""
    if not directory.exists():
        directory.mkdir(parents=True)
        tiny_tokenizer().save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(tiny_model.CHAT_TEMPLATE)
        (directory / "generation_config.json").write_text('{"eos_token_id": 0}')
    text = LazyModelText(partial(load_model_text, directory))
    return ServedModel(directory, TINY_MODEL, TINY_MODEL.max_positions, text)


async def _open_stores(config: ServerConfig, stack: AsyncExitStack, telemetry: Telemetry | None) -> Stores:
    """Do not look for what is too old in a new data directory, which takes half of a test's time."""
    with pytest.MonkeyPatch.context() as patch:
        if not (config.data_dir / "payloads").exists():
            patch.setattr(Reaper, "reap", _reap_nothing)
        return await open_stores(config, stack, telemetry)


async def _reap_nothing(self: Reaper, **how: object) -> list[Reaped]:
    return []


@asynccontextmanager
async def run_services(
    data_dir: Path, database_url: str | None = None, more: MoreBases = lambda data_dir, stack: []
) -> AsyncIterator[Services]:
    """The parts of a server of a tiny model; FakeScheduler stands in for the scheduler and the workers.

    ``more`` are its bases besides that model.
    """
    config = ServerConfig(
        base_model=BASE_MODEL, host="server", data_dir=data_dir, database_url=database_url, max_lora_rank=16
    )
    async with AsyncExitStack() as stack:
        telemetry = open_telemetry(os.environ)
        if telemetry is not None:
            stack.push_async_callback(asyncio.to_thread, telemetry.close)
        stores = await _open_stores(config, stack, telemetry)
        bases = Bases(
            [open_base(config, tiny_served_model(data_dir / "model"), stack), *more(data_dir, stack)]
        )
        scheduler = FakeScheduler(stores.queue, stores.catalog, stores.checkpoints, bases)
        running = [
            asyncio.create_task(scheduler.run()),
            asyncio.create_task(stores.queue.run(scheduler.arrive)),
        ]
        backend = Backend(
            scheduler=scheduler, health=ServerHealth([running_group(MAIN)]), progress=SampleProgress()
        )
        yield await open_services(config, bases, stores, backend, stack)
        for task in running:
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled(), task.exception()


@pytest.fixture
async def services(database_url: str | None, tmp_path: Path) -> AsyncIterator[Services]:
    async with run_services(tmp_path, database_url) as services:
        yield services


@functools.cache
def shared_app() -> Litestar:
    """Building the routes takes longer than most tests; a test brings its own services."""
    return make_app(cast(Services, None))


@pytest.fixture
def app(services: Services) -> Litestar:
    app = shared_app()
    app.state.services = services
    return app


@pytest.fixture
async def api(app: Litestar) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(cast(Any, app))
    async with httpx.AsyncClient(transport=transport, base_url="http://server/api/v1/") as client:
        yield client


@pytest.fixture
async def client_for(
    app: Litestar, services: Services
) -> AsyncIterator[Callable[..., Awaitable[httpx.AsyncClient]]]:
    """Make a key, and a client that sends it: ``await client_for("alice", role="read-only")``."""
    async with AsyncExitStack() as stack:

        async def client_for(owner: str, **wish: Any) -> httpx.AsyncClient:
            async with services.database.transaction() as db:
                token, _ = await keys.create(db, keys.NewKeyOptions(owner, **wish))
            await services.keyring.look()
            client = httpx.AsyncClient(
                transport=httpx.ASGITransport(cast(Any, app)),
                base_url="http://server/api/v1/",
                headers={"x-api-key": token},
            )
            return await stack.enter_async_context(client)

        yield client_for


@pytest.fixture
async def session_id(api: httpx.AsyncClient) -> str:
    return (await api.post("create_session", json={"tags": [], "sdk_version": "0.38.0"})).json()["session_id"]


@pytest.fixture
async def model_id(api: httpx.AsyncClient, session_id: str) -> str:
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": BASE_MODEL, "lora_config": {"rank": 8}}
    return (await api.post("create_model", json=body)).json()["model_id"]
