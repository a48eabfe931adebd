"""What a route is handed: everything the application is made of."""

from dataclasses import dataclass
from typing import Protocol

from litestar.datastructures import State
from litestar.di import NamedDependency

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.catalog import Catalog
from spmd_tx.coordinator.checkpoint_catalog import CheckpointCatalog
from spmd_tx.coordinator.request_queue import RequestQueue
from spmd_tx.models.config import ModelConfig


class QueueStatus(Protocol):
    """What a client is told about a request that is not finished."""

    @property
    def queue_state(self) -> str: ...  # "active", "paused_capacity" or "paused_rate_limit"

    @property
    def reason(self) -> str | None: ...


class RequestScheduler(Protocol):
    """What the routes use of the scheduler; arrivals reach it through the queue."""

    def session_ended(self, session_id: str) -> None: ...

    def status(self, request_id: str) -> QueueStatus: ...

    def cancel(self, request_id: str) -> None: ...


class Health(Protocol):
    """Whether a request would be served now."""

    @property
    def phase(self) -> str: ...  # "starting: loading weights 45 %"

    @property
    def ready(self) -> bool: ...

    @property
    def failure(self) -> str | None: ...  # why no request will be served any more


@dataclass(frozen=True)
class Services:
    """All that the routes need."""

    config: ServerConfig
    model: ModelConfig
    max_context: int  # tokens
    tokenizer_id: str  # Hugging Face id, or the model directory
    catalog: Catalog
    checkpoints: CheckpointCatalog
    queue: RequestQueue
    scheduler: RequestScheduler
    health: Health


Service = NamedDependency[Services]


def give_services(state: State) -> Services:
    return state.services
