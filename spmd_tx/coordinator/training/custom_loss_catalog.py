"""The catalog of custom losses that clients have created, which the log keeps as requests.

The payload of its creation is the loss, so retention keeps it while its session can use it or may have to be
restored. Its id is derived from the request's, which nobody can guess.
"""

from collections import OrderedDict
from dataclasses import dataclass, replace

import msgspec
from sqlalchemy import select

from spmd_tx.coordinator.requests import rows
from spmd_tx.coordinator.requests.queue import RequestQueue
from spmd_tx.coordinator.requests.records import Finished, Request
from spmd_tx.coordinator.runtime.byte_lru import ByteLru
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.tables import LOCAL_OWNER, SessionRow
from spmd_tx.coordinator.wire.training import CreateCustomLossResult
from spmd_tx.coordinator.wire.training_protobuf import JSON
from spmd_tx.custom_loss import definition as custom_loss
from spmd_tx.custom_loss.arguments import quoted
from spmd_tx.custom_loss.definition import CheckedLoss
from spmd_tx.errors import InvalidRequest

KIND = "create_custom_loss"
MOST_GIVEN_UP = 10_000  # losses that are remembered as given up
CACHE_BYTES = 64 << 20  # of payloads; decoded losses take a few times as much

_PREFIX = "loss-"


@dataclass(frozen=True)
class StoredLoss:
    """Holds a loss, and the bytes that workers compile it from."""

    loss: CheckedLoss
    definition: bytes
    tenant: str  # who takes turns with others: an owner, or a session on a server without keys
    refusal: str | None = None  # why it is no longer run


class CustomLossCatalog:
    """Finds custom losses by their id."""

    def __init__(self, database: Database, log: RequestQueue) -> None:
        self._database = database
        self._log = log
        self._given_up: OrderedDict[str, str] = OrderedDict()  # why, by id; for the life of this server
        self._recent: ByteLru[tuple[str, StoredLoss]] = ByteLru(CACHE_BYTES)  # with their session

    async def open(self, loss_id: str, session_id: str) -> StoredLoss:
        """Return a loss. Raises InvalidRequest when this session has no such loss."""
        stored = await self._open(loss_id, session_id)
        refusal = self._given_up.get(loss_id)
        return stored if refusal is None else replace(stored, refusal=refusal)

    async def body(self, request: Request) -> bytes:
        """Read the body of a request that has waited for a loss, when memory did not keep it."""
        return await self._log.payload(request)

    def give_up(self, loss_id: str, why: str) -> None:
        """Refuse to run a loss from now on."""
        self._given_up[loss_id] = why
        while len(self._given_up) > MOST_GIVEN_UP:
            self._given_up.popitem(last=False)

    async def _open(self, loss_id: str, session_id: str) -> StoredLoss:
        known = self._recent.get(loss_id)
        if known is not None and known[0] == session_id:
            return known[1]
        async with self._database.reading() as db:
            request = await rows.succeeded(db, loss_id.removeprefix(_PREFIX), KIND, session_id)
            owner = await db.scalar(select(SessionRow.owner).where(SessionRow.id == session_id))
        if request is None or loss_id != id_of(request):
            raise InvalidRequest(
                f"custom loss {quoted(loss_id)} does not exist in this session; create it with "
                "create_custom_loss of the same ServiceClient as the model"
            )
        definition = await self._log.payload(request)
        tenant = session_id if owner in (None, LOCAL_OWNER) else f"owner {owner}"
        stored = StoredLoss(custom_loss.read(custom_loss.decode(definition)), definition, tenant)
        self._recent.put(loss_id, (session_id, stored), len(definition))
        return stored


def line_of(session_id: str) -> str:
    """Name the line in which a session's creations are numbered."""
    return f"{session_id}:custom_loss"


def id_of(request: Request) -> str:
    return _PREFIX + request.id


def created(request: Request) -> Finished:
    """Return the outcome of a creation that was validated before it was accepted."""
    return Finished(JSON, msgspec.json.encode(CreateCustomLossResult(id_of(request))))
