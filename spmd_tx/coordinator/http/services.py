"""The services that routes use, and their injection into routes."""

import asyncio
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from litestar import Request
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.handlers import BaseRouteHandler

from spmd_tx.bounds import Bounds
from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.bases.bases import Bases
from spmd_tx.coordinator.bases.health import ServerHealth
from spmd_tx.coordinator.bases.served_base import ServedBase
from spmd_tx.coordinator.catalog.catalog import Catalog
from spmd_tx.coordinator.checkpoints.catalog import CheckpointCatalog
from spmd_tx.coordinator.checkpoints.uploads import Uploads
from spmd_tx.coordinator.http.checkpoint_copies import CheckpointCopies
from spmd_tx.coordinator.http.checkpoint_uploads import CheckpointUploads
from spmd_tx.coordinator.http.implicit_samplers import ImplicitSamplers
from spmd_tx.coordinator.http.long_polls import Polls
from spmd_tx.coordinator.http.notices import Notices
from spmd_tx.coordinator.http.public_address import base_url
from spmd_tx.coordinator.http.security.access import Access
from spmd_tx.coordinator.http.security.body_room import make_rooms
from spmd_tx.coordinator.http.security.quotas import Quotas
from spmd_tx.coordinator.http.security.signed_urls import SignedUrls, open_secret
from spmd_tx.coordinator.http.security.turn_seals import TurnSeals
from spmd_tx.coordinator.http.security.turns import Turns
from spmd_tx.coordinator.http.shared_answers import SharedAnswers
from spmd_tx.coordinator.requests import records
from spmd_tx.coordinator.requests.line_numbers import LineNumbers
from spmd_tx.coordinator.requests.logged_images import LoggedImages
from spmd_tx.coordinator.requests.queue import RequestQueue
from spmd_tx.coordinator.requests.runs.curve_store import CurveStore
from spmd_tx.coordinator.requests.runs.metric_names import MetricNames
from spmd_tx.coordinator.requests.runs.news_streams import NewsStreams
from spmd_tx.coordinator.requests.runs.sample_reader import SampleReaders
from spmd_tx.coordinator.requests.traces import TraceExports
from spmd_tx.coordinator.retention.reaper import Reaper
from spmd_tx.coordinator.sampling.progress import SampleProgress
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.disk import DiskGuard
from spmd_tx.coordinator.tenancy import audit
from spmd_tx.coordinator.tenancy.keyring import Keyring, open_keyring
from spmd_tx.coordinator.text.turn_memory import TurnMemory
from spmd_tx.coordinator.trajectories.trajectories import Trajectories
from spmd_tx.coordinator.trajectories.trees import TrajectoryTrees
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.errors import Unavailable


class RequestScheduler(Protocol):
    """Is the routes' view of the scheduler; requests reach it through the queue."""

    def consume(self, model_id: str, seq_id: int) -> None:
        """Skip the number of a refused request, so that later ones do not wait for it."""
        ...

    def session_ended(self, session_id: str) -> None: ...

    def status(self, request_id: str) -> records.QueueStatus: ...

    def cancel(self, request_id: str) -> None: ...

    def group_of(self, request: records.Request) -> str | None:
        """Name the group that has an unfinished request; None: its base model is not served now."""
        ...

    def retire(self, samplers: Mapping[str, str]) -> None:
        """Give up the versions of samplers that were not used for long; they have their bases' names."""
        ...


@dataclass(frozen=True, kw_only=True)
class Stores:
    """Holds what reads and writes the database and the data directory."""

    database: Database
    storage: DiskGuard
    queue: RequestQueue
    reaper: Reaper
    catalog: Catalog
    checkpoints: CheckpointCatalog


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Holds what carries out requests."""

    scheduler: RequestScheduler
    health: ServerHealth
    progress: SampleProgress


class Services(Stores, Backend):
    """Holds everything that the routes need."""

    def __init__(
        self,
        config: ServerConfig,
        bases: Bases,
        stores: Stores,
        backend: Backend,
        keyring: Keyring,
        secret: bytes,
    ) -> None:
        Stores.__init__(self, **vars(stores))
        Backend.__init__(self, **vars(backend))
        bounds, payloads = config.bounds, config.data_dir / "payloads"
        uploads = Uploads(config.data_dir, bounds.open_uploads)
        self.config = config
        self.bases = bases
        self.keyring = keyring
        self.copies = CheckpointCopies(self.checkpoints, self.queue, bases)
        self.uploads = CheckpointUploads(uploads, self.checkpoints, self.queue, self.storage, bases)
        self.signed_urls = SignedUrls(secret)
        self.turn_seals = TurnSeals(secret)
        self.traces = TraceExports(self.database, config.data_dir)
        self.quotas = Quotas(self.database, self.catalog, self.queue, bounds)
        self.samples = SampleReaders(payloads, bounds)
        self.images = LoggedImages(self.database, payloads)
        self.implicit_samplers = ImplicitSamplers(self.catalog, bases)
        self.notices = Notices()
        self.body_rooms = make_rooms(bounds)
        self.turns = Turns(bounds)
        self.polls = Polls(bounds.polls, self.health.closing)
        self.line_numbers = LineNumbers(self.database, bounds.seq_ids_ahead)
        self.metric_names = MetricNames(self.database, bounds.metric_names, bounds.metric_name_characters)
        self.curves = CurveStore(self.database)
        self.streams = NewsStreams(self.queue.news, self.catalog, keyring, bounds)
        self.shared_answers = SharedAnswers()
        self.turn_memory = TurnMemory(bounds.turn_memory_bytes)
        trees = TrajectoryTrees(self.database, bounds.turn_memory_bytes)
        self.trajectories = Trajectories(self.database, bounds, trees)


async def open_services(
    config: ServerConfig, bases: Bases, stores: Stores, backend: Backend, stack: AsyncExitStack
) -> Services:
    """Make what the routes need, around a scheduler; the stack closes it."""
    keyring = await open_keyring(stores.database, config.data_dir)
    secret = await asyncio.to_thread(open_secret, config.data_dir)
    services = Services(config, bases, stores, backend, keyring, secret)
    stack.push_async_callback(services.samples.close)
    stack.push_async_callback(services.trajectories.close)
    return services


@dataclass(frozen=True, kw_only=True)
class RouteCall(Access):
    """Is the call of a route that knows its caller: what the caller may see, and what the route needs."""

    request: Request
    services: Services

    @property
    def bounds(self) -> Bounds:
        return self.services.config.bounds

    async def note(self, event: str, owner: str, **details: object) -> None:
        """Record what the caller did to something of an owner, who is another one than an admin."""
        await audit.note(self.services.database, audit.AuditEvent(event, self.caller, owner, details))

    def sign(self, path: str, owner: str, expires_at: float | None = None) -> str:
        """Return a signed URL of this server, with which anybody may read or send what an owner may."""
        base = base_url(self.request, self.services.config.trusted_proxies)
        return self.services.signed_urls.sign(base, path, owner, self.caller.key_id, expires_at)


ApiCall = NamedDependency[RouteCall]
Service = NamedDependency[Services]
Addressed = NamedDependency[CheckpointPath]


def provide_services(state: State) -> Services:
    return state.services


def provide_call(request: Request, state: State) -> RouteCall:
    services: Services = state.services
    return RouteCall(
        request.auth,
        services.catalog,
        services.checkpoints,
        services.queue,
        request=request,
        services=services,
    )


def check_running(services: Services, base: ServedBase) -> None:
    """Raise Unavailable where all workers of a base model have failed, so that new work would only wait."""
    problem = services.health.problem_of(base.key)
    if problem is not None:
        raise Unavailable(problem)


async def accepts_work(connection: ASGIConnection, _: BaseRouteHandler) -> None:
    """Guard routes that accept work: raise Unavailable while the server ends or its storage fails.

    Work is accepted while workers start. Clients send refused work again for some minutes.
    """
    services: Services = connection.app.state.services
    refusal = services.health.refusal or services.storage.problem
    if refusal is not None:
        raise Unavailable(refusal)
