"""Creates, looks up and ends sessions, models and samplers.

This process is the only writer, so rows that were looked up once are answered from memory.
"""

import logging
import uuid
from collections.abc import Collection, Iterable
from typing import Literal, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET
from sqlalchemy import select, update

from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.tables import LOCAL_OWNER, ModelRow, SamplerRow, SessionRow
from spmd_tx.coordinator.tenancy import audit
from spmd_tx.coordinator.tenancy.audit import AuditEvent
from spmd_tx.coordinator.tenancy.callers import EVERYONE, SERVER, Caller
from spmd_tx.coordinator.wire.console.runs import ChangeRunRequest
from spmd_tx.coordinator.wire.sessions import CreateSessionRequest, FinishSessionRequest
from spmd_tx.errors import InvalidRequest, NotFound
from spmd_tx.protocol.commands import AdapterSpec

logger = logging.getLogger(__name__)

Row = TypeVar("Row", SessionRow, ModelRow, SamplerRow)

SILENT_SECONDS = 30.0  # without a heartbeat, of which a client sends one every 10 s
MAX_DETAIL = 2000  # characters of a client's detail about its end

START_AGAIN = "create a new client, from a saved checkpoint if there is one"


def model_id(session_id: str, seq_id: int) -> str:
    return f"{session_id}:train:{seq_id}"


def sampler_id(session_id: str, seq_id: int | Literal[""]) -> str:
    """Return the id of a sampler; with "", what those of a session begin with."""
    return f"{session_id}:sample:{seq_id}"


class SamplerWeights(NamedTuple):
    """Says what a sampler samples from: a checkpoint, a model's weights, or else the base model."""

    model_path: str | None = None  # tinker:// path of a checkpoint
    model_id: str | None = None
    version: str | None = None  # of the model's weights
    inflight: bool = False  # whether it always uses the weights that the model has saved last in this way


class Catalog:
    """Serves rows that are detached from the database; callers must not change them."""

    def __init__(self, database: Database, open_sessions: Iterable[SessionRow]) -> None:
        self._database = database
        self._sessions = {session.id: session for session in open_sessions}
        self._models: dict[str, ModelRow] = {}
        self._samplers: dict[str, SamplerRow] = {}
        self._last_seen = dict.fromkeys(self._sessions, clock.now())  # of the open sessions

    async def create_session(self, request: CreateSessionRequest, caller: Caller = EVERYONE) -> SessionRow:
        session = SessionRow(
            id=str(uuid.uuid4()),
            created_at=clock.now(),
            owner=caller.owner,
            key_id=caller.key_id,
            **msgspec.structs.asdict(request),
        )
        async with self._database.transaction() as db:
            db.add(session)
            audit.add(db, AuditEvent("session_created", caller, caller.owner, {"session_id": session.id}))
        self._sessions[session.id] = session
        self._last_seen[session.id] = session.created_at
        return session

    async def session(self, session_id: str) -> SessionRow:
        return await self._find(self._sessions, SessionRow, session_id)

    async def open_session(self, session_id: str) -> SessionRow:
        """A session that still takes requests. Raises NotFound or InvalidRequest."""
        session = await self.session(session_id)
        if session.id not in self._last_seen:
            raise InvalidRequest(f"{_ending(session)}; {START_AGAIN}")
        return session

    def owner_of(self, session_id: str) -> str:
        """Return the owner of a session that is open or has a model in ``open_models``."""
        session = self._sessions.get(session_id)
        return LOCAL_OWNER if session is None else session.owner

    def open_sessions_of(self, owner: str) -> int:
        """How many of an owner's sessions have not ended."""
        return sum(self._sessions[id].owner == owner for id in self._last_seen)

    async def heartbeat(self, session_id: str) -> bool:
        """Note a client's sign of life; False when its session has ended."""
        await self.session(session_id)
        is_open = session_id in self._last_seen
        if is_open:
            self._last_seen[session_id] = clock.now()
        return is_open

    def silent_seconds(self, session_id: str) -> float | None:
        """How long the client of an open session has been silent; None as long as that is nothing unusual."""
        seconds = self.unheard_seconds(session_id)
        return seconds if seconds >= SILENT_SECONDS else None

    def unheard_seconds(self, session_id: str) -> float:
        """Return the time since the last heartbeat of an open session; 0 for others."""
        seen = self._last_seen.get(session_id)
        return 0.0 if seen is None else clock.now() - seen

    async def set_project(self, session_id: str, project_id: str | None, caller: Caller = EVERYONE) -> None:
        session = await self.session(session_id)
        details = {"session_id": session_id, "project_id": project_id}
        async with self._database.transaction() as db:
            await db.execute(
                update(SessionRow).where(SessionRow.id == session_id).values(project_id=project_id)
            )
            audit.add(db, AuditEvent("project_session_assigned", caller, session.owner, details))
        session.project_id = project_id

    async def end_session(self, session_id: str, because: str) -> bool:
        """End a session with its models and samplers; False when it had ended before."""
        return await self._end(session_id, {"ended_because": because}, SERVER)

    async def finish_session(self, session_id: str, ending: FinishSessionRequest, caller: Caller) -> bool:
        """End a session at its client's request; False when it had ended before."""
        reason = ending.reason.type
        values = {
            "ended_because": f"its client finished: {reason}",
            "finish_reason": reason,
            "finish_detail": ending.detail and ending.detail[:MAX_DETAIL],
        }
        return await self._end(session_id, values, caller)

    async def _end(self, session_id: str, values: dict[str, str | None], caller: Caller) -> bool:
        session = await self.session(session_id)
        if self._last_seen.pop(session_id, None) is None:
            return False
        session.ended_at, session.ended_because = clock.now(), values["ended_because"]
        details = {"session_id": session_id, "because": values["ended_because"]}
        async with self._database.transaction() as db:
            ending = update(SessionRow).where(SessionRow.id == session_id)
            await db.execute(ending.values(ended_at=session.ended_at, **values))
            audit.add(db, AuditEvent("session_ended", caller, session.owner, details))
        self._forget(session_id)
        return True

    async def expire_sessions(self, now: float, timeout: float) -> list[str]:
        """End the sessions whose clients were silent for ``timeout`` seconds; return their ids."""
        silent = [id for id, seen in self._last_seen.items() if seen + timeout < now]
        for session_id in silent:
            logger.info("session %s ends: no heartbeat for %.0f s", session_id, timeout)
            await self.end_session(session_id, f"its client was silent for {timeout:.0f} seconds")
        return silent

    async def model(self, model_id: str) -> ModelRow:
        return await self._find(self._models, ModelRow, model_id)

    async def set_adapter(self, model_id: str, adapter: AdapterSpec) -> None:
        """Store the adapter that a model has after loading a checkpoint."""
        values = msgspec.to_builtins(adapter)
        async with self._database.transaction() as db:
            await db.execute(update(ModelRow).where(ModelRow.id == model_id).values(values))
        self._models.pop(model_id, None)

    async def label_model(self, model: ModelRow, change: ChangeRunRequest, caller: Caller) -> None:
        """Store under what a model is listed."""
        values = dict[str, str | float | None]()
        if change.name is not UNSET:
            values["name"] = change.name
        if change.group is not UNSET:
            values["run_group"] = change.group
        if change.archived is not UNSET:
            values["archived_at"] = clock.now() if change.archived else None
        session = await self.session(model.session_id)
        details = {"run_id": model.id, **msgspec.to_builtins(change)}
        async with self._database.transaction() as db:
            await db.execute(update(ModelRow).where(ModelRow.id == model.id).values(values))
            audit.add(db, AuditEvent("run_changed", caller, session.owner, details))
        self._models.pop(model.id, None)

    async def open_models(self, others: Collection[str]) -> list[ModelRow]:
        """The models of all open sessions, and of the sessions ``others``, in the order of their creation."""
        sessions = self._last_seen.keys() | set(others)
        are_wanted = select(ModelRow).where(ModelRow.session_id.in_(sorted(sessions)))
        have_ended = select(SessionRow).where(SessionRow.id.in_(sorted(sessions - self._sessions.keys())))
        async with self._database.reading() as db:
            self._sessions.update({session.id: session for session in await db.scalars(have_ended)})
            return list(await db.scalars(are_wanted.order_by(ModelRow.created_at, ModelRow.id)))

    async def ranks(self) -> set[int]:
        """The ranks that models were asked for with; 0: all weights."""
        are_trained = select(ModelRow.rank).where(ModelRow.copied_from.is_(None))
        async with self._database.reading() as db:
            return set(await db.scalars(are_trained.distinct()))

    def has_ended(self, session_id: str) -> bool:
        return session_id not in self._last_seen

    async def set_version(self, sampler: SamplerRow, version: str) -> None:
        """Store which weights a sampler was opened with."""
        async with self._database.transaction() as db:
            await db.execute(update(SamplerRow).where(SamplerRow.id == sampler.id).values(version=version))
        sampler.version = version

    async def sampler(self, sampler_id: str) -> SamplerRow:
        return await self._find(self._samplers, SamplerRow, sampler_id)

    async def join_sampler(self, sampler: SamplerRow) -> int:
        """Count one more client of a sampler, and return its unique number."""
        one_more = (
            update(SamplerRow).where(SamplerRow.id == sampler.id).values(clients=SamplerRow.clients + 1)
        )
        async with self._database.transaction() as db:
            number = (await db.execute(one_more.returning(SamplerRow.clients))).scalar_one()
        sampler.clients = max(sampler.clients, number)
        return number

    async def inflight_samplers(self, model_id: str) -> list[str]:
        """The ids of a model's in-flight samplers, newest first."""
        query = select(SamplerRow.id).where(SamplerRow.model_id == model_id, SamplerRow.inflight.is_(True))
        async with self._database.reading() as db:
            return list(await db.scalars(query.order_by(SamplerRow.created_at.desc())))

    async def problem(self, row: ModelRow | SamplerRow) -> str | None:
        """Why a model or sampler takes no more requests; None when it does."""
        session = await self.session(row.session_id)
        if session.id not in self._last_seen:
            return f"{_ending(session)}, and {row.id} with it; {START_AGAIN}"
        self._last_seen[session.id] = clock.now()  # work is a sign of life, too
        if isinstance(row, ModelRow) and row.copied_from is not None:
            return cannot_be_trained(row.id, row.copied_from)
        return None

    async def add_sampler(
        self, session_id: str, seq_id: int, base_model: str, weights: SamplerWeights = SamplerWeights()
    ) -> SamplerRow:
        """Create a sampler, by default of the base model.

        The same number in the same session gives the same sampler again, if the weights are the same; other
        ones raise InvalidRequest.
        """
        sampler = SamplerRow(
            id=sampler_id(session_id, seq_id),
            session_id=session_id,
            base_model=base_model,
            created_at=clock.now(),
            **weights._asdict(),
        )
        async with self._database.transaction() as db:
            existing = await db.get(SamplerRow, sampler.id)
            if existing is None:
                db.add(sampler)
        if existing is not None and not _is_same(existing, sampler):
            raise InvalidRequest(
                f"sampling_session_seq_id {seq_id} of session {session_id!r} is already in use; "
                "send the next one"
            )
        return self._samplers.setdefault(sampler.id, existing or sampler)

    def _forget(self, session_id: str) -> None:
        """Drop an ended session's rows from memory; later requests read them from the database."""
        del self._sessions[session_id]
        for known in (self._models, self._samplers):
            for id in [id for id, row in known.items() if row.session_id == session_id]:
                del known[id]

    async def _find(self, known: dict[str, Row], table: type[Row], id: str) -> Row:
        if id in known:
            return known[id]
        row = None
        if "\0" not in id:  # PostgreSQL refuses to look for it
            async with self._database.reading() as db:
                row = await db.get(table, id)
        if row is None:
            raise unknown(table, id)
        known[id] = row
        return row


async def open_catalog(database: Database) -> Catalog:
    """Continue with what is in the database."""
    async with database.reading() as db:
        open_sessions = (await db.scalars(select(SessionRow).where(SessionRow.ended_at.is_(None)))).all()
    return Catalog(database, open_sessions)


def unknown(table: type[SessionRow] | type[ModelRow] | type[SamplerRow], id: str) -> NotFound:
    return NotFound(
        f"{table.__tablename__.removesuffix('s')} {id!r} does not exist on this server; {START_AGAIN}"
    )


def cannot_be_trained(model_id: str, source: str) -> str:
    return f"{model_id} only holds a copy of {source}; load the copy into a new model to train it"


def _is_same(existing: SamplerRow, requested: SamplerRow) -> bool:
    """Whether a sampler is what is asked for. Rows from before 0.2 have no version of a model's weights."""
    source = (existing.model_path, existing.model_id, existing.inflight)
    if source != (requested.model_path, requested.model_id, requested.inflight):
        return False
    return existing.model_id is None or existing.version in (None, requested.version)


def _ending(session: SessionRow) -> str:
    return f"session {session.id!r} has ended ({session.ended_because})"
