"""Routes of trajectories: what agents have sampled below their base URLs, to look at, reward and train on."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec
from litestar import Controller, delete, get, post
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath, FromQuery, JSONBody, QueryParameter
from litestar.status_codes import HTTP_200_OK

from spmd_tx.coordinator.http.answer_guard import in_turn
from spmd_tx.coordinator.http.authentication import READS
from spmd_tx.coordinator.http.public_address import base_url
from spmd_tx.coordinator.http.security import trajectory_keys
from spmd_tx.coordinator.http.services import ApiCall, Services
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage.tables import TrajectoryRow
from spmd_tx.coordinator.tenancy import audit
from spmd_tx.coordinator.tenancy.audit import AuditEvent
from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.coordinator.text.model_text import ModelText
from spmd_tx.coordinator.trajectories import catalog, listing, views
from spmd_tx.coordinator.trajectories.catalog import BEFORE_ALL, TurnQuery
from spmd_tx.coordinator.trajectories.listing import (
    NEWEST_FIRST,
    TrajectoryOrder,
    TrajectoryPlace,
    TrajectoryQuery,
)
from spmd_tx.coordinator.trajectories.segments import segments
from spmd_tx.coordinator.wire.fields import StatusResponse
from spmd_tx.coordinator.wire.page_room import PageRoom
from spmd_tx.coordinator.wire.trajectories import (
    CreateKeyRequest,
    CreateTrajectoryRequest,
    Segment,
    SequencesRequest,
    SequencesResponse,
    TrajectoryEntry,
    TrajectoryKey,
    TrajectoryList,
    TrajectoryReward,
    TrajectorySort,
    TrajectoryTree,
    TurnEntry,
)
from spmd_tx.errors import InvalidRequest

PAGE = 100  # trajectories
TURNS_AT_ONCE = 16  # that are read from the database
MOST_DIGITS = 18  # of the number of a turn, as a cursor
MOST_REQUESTS = 50  # whose turns are shown alone
STATES = Literal["open", "finished"]
BASES_OF_DIALECTS = {"openai": "/oai/api/in/{}/v1", "anthropic": "/anthropic/api/in/{}"}


def _page(
    name: FromQuery[str] = "",
    with_state: Annotated[STATES | None, QueryParameter(name="state")] = None,
    search: FromQuery[str] = "",
    sort: FromQuery[TrajectorySort] = "created",
    ascending: FromQuery[bool] = False,
    cursor: FromQuery[str | None] = None,
) -> TrajectoryQuery:
    order = TrajectoryOrder(sort, ascending)
    after = None if cursor is None else order.place(cursor)
    return TrajectoryQuery(name=name, search=search, state=with_state, order=order, after=after, most=PAGE)


def _selected_turns(
    turns_of: FromQuery[str | None] = None, cursor: FromQuery[str | None] = None
) -> TurnQuery:
    requests = None if turns_of is None else _requests(turns_of)
    return TurnQuery(request_ids=requests, after=_last_turn(cursor), most=TURNS_AT_ONCE)


class TrajectoriesController(Controller):
    path = "/trajectories"

    @post("/", status_code=HTTP_200_OK)
    async def create_trajectory(
        self, data: JSONBody[CreateTrajectoryRequest], call: ApiCall
    ) -> TrajectoryEntry:
        """Create a trajectory. The first call below its base URL does so, too."""
        call.services.quotas.check_metadata(call.caller, len(msgspec.json.encode(data)))
        if data.model is not None:
            await call.services.implicit_samplers.find(data.model, call)
        async with call.services.database.transaction() as db:
            row = await catalog.create(db, call.caller, data, call.bounds)
            return (await views.entries(db, [row]))[0]

    @get("/", guards=[in_turn], dependencies={"page": Provide(_page, sync_to_thread=False)})
    async def trajectories(self, call: ApiCall, page: NamedDependency[TrajectoryQuery]) -> TrajectoryList:
        """List trajectories by what their names begin with and have in them; the newest first."""
        async with call.services.database.reading() as db:
            rows = await listing.listed(db, call.caller, page)
            entries = await views.entries(db, rows)
        return TrajectoryList(entries, page.order.cursor(rows[-1]) if len(rows) == PAGE else None)

    @get(
        "/{trajectory_id:str}",
        guards=[in_turn],
        dependencies={"selected": Provide(_selected_turns, sync_to_thread=False)},
    )
    async def trajectory(
        self,
        trajectory_id: FromPath[str],
        call: ApiCall,
        selected: NamedDependency[TurnQuery],
        tokens: FromQuery[bool] = False,
        outline: FromQuery[bool] = False,
    ) -> TrajectoryTree:
        """Return a trajectory with its turns, and with the texts and log-probabilities of sampled tokens.

        With ``outline`` turns have no messages; with ``turns_of`` only those of these requests are there. If
        the answer has a ``cursor``, the next page has further turns.
        """
        async with call.services.database.reading() as db:
            row = await catalog.find(db, call.caller, trajectory_id)
            (entry,) = await views.entries(db, [row])
            if outline:
                return TrajectoryTree(entry, views.outline_entries(await catalog.outlines_of(db, row.id)))
        turns, last = await _page_of_turns(call.services, row.id, selected, with_tokens=tokens)
        return TrajectoryTree(entry, turns, None if last is None else str(last))

    @post("/{trajectory_id:str}/rewards", status_code=HTTP_200_OK)
    async def reward(
        self, trajectory_id: FromPath[str], data: JSONBody[TrajectoryReward], call: ApiCall
    ) -> StatusResponse:
        """Reward a turn, or the trajectory. A later reward replaces it."""
        call.services.quotas.check_metrics(call.caller, len(msgspec.json.encode(data)))
        async with call.services.database.transaction() as db:
            await catalog.reward(db, await catalog.find(db, call.caller, trajectory_id), data)
        return StatusResponse("ok")

    @post("/{trajectory_id:str}/finish", status_code=HTTP_200_OK)
    async def finish(self, trajectory_id: FromPath[str], call: ApiCall) -> StatusResponse:
        """Let a trajectory take no more turns."""
        async with call.services.database.transaction() as db:
            row = await catalog.find(db, call.caller, trajectory_id)
            await catalog.finish(db, row, call.caller)
        return StatusResponse("ok")

    @delete("/{trajectory_id:str}", status_code=HTTP_200_OK)
    async def delete_trajectory(self, trajectory_id: FromPath[str], call: ApiCall) -> StatusResponse:
        """Delete a trajectory with its turns."""
        async with call.services.database.transaction() as db:
            row = await catalog.find(db, call.caller, trajectory_id)
            await catalog.remove(db, row, call.caller)
        call.services.trajectories.trees.forget(trajectory_id)
        return StatusResponse("ok")

    @post("/{trajectory_id:str}/keys", status_code=HTTP_200_OK)
    async def create_key(
        self, trajectory_id: FromPath[str], data: JSONBody[CreateKeyRequest], call: ApiCall
    ) -> TrajectoryKey:
        """Make a key that can only sample in one trajectory, for a sandbox."""
        async with call.services.database.transaction() as db:
            row = await catalog.find(db, call.caller, trajectory_id)
            audit.add(
                db, AuditEvent("trajectory_key_created", call.caller, row.owner, {"trajectory": row.id})
            )
        expires_at = int(clock.now() + data.expires_seconds)
        key = trajectory_keys.seal(call.services.signed_urls, call.caller, row.owner, row.id, expires_at)
        server = base_url(call.request, call.services.config.trusted_proxies)
        urls = {dialect: server + path.format(row.id) for dialect, path in BASES_OF_DIALECTS.items()}
        return TrajectoryKey(key, datetime.fromtimestamp(expires_at, UTC), urls)

    @post("/sequences", status_code=HTTP_200_OK, opt=READS)
    async def sequences(self, data: JSONBody[SequencesRequest], call: ApiCall) -> SequencesResponse:
        """Return the tokens of trajectories as sequences to train on, which counts as a use of them."""
        if (data.ids is None) == (data.name is None):
            raise InvalidRequest("send either the IDs of trajectories, or name, with which their names begin")
        room, found = PageRoom(call.bounds.answer_bytes), list[Segment]()
        texts, before = await _texts(call.services), None
        async for row in _selected(call.services, call.caller, data):
            async with call.services.database.reading() as db:
                turns = await catalog.turns_of(db, row.id)
            made = await asyncio.to_thread(segments, row, turns, texts, data.leaves)
            size = await asyncio.to_thread(lambda made=made: len(msgspec.json.encode(made)))
            if not room.takes_bytes(size):
                return SequencesResponse(found, before)
            found += made
            before = NEWEST_FIRST.cursor(row)
        return SequencesResponse(found)


async def _selected(
    services: Services, caller: Caller, asked: SequencesRequest
) -> AsyncIterator[TrajectoryRow]:
    """Yield the trajectories that are asked for, the newest first, and note that they are used."""
    place = None if asked.cursor is None else NEWEST_FIRST.place(asked.cursor)
    while True:
        query = TrajectoryQuery(name=asked.name or "", ids=asked.ids, after=place, most=PAGE)
        async with services.database.reading() as db:
            rows = await listing.listed(db, caller, query)
        async with services.database.transaction() as db:
            await catalog.use(db, [row.id for row in rows])
        if asked.ids is not None and place is None:
            async with services.database.reading() as db:
                seen = await catalog.seen_of(db, caller, asked.ids)
            missing = next((id for id in asked.ids if id not in seen), None)
            if missing is not None:
                raise catalog.not_there(missing)
        for row in rows:
            yield row
            place = TrajectoryPlace(row.created_at, row.id)
        if len(rows) < PAGE:
            return


async def _page_of_turns(
    services: Services, trajectory_id: str, selected: TurnQuery, *, with_tokens: bool
) -> tuple[list[TurnEntry], int | None]:
    """Return turns of a trajectory, and the number of the last one if there are more."""
    room, found, texts = (
        PageRoom(services.config.bounds.answer_bytes),
        list[TurnEntry](),
        await _texts(services),
    )
    while True:
        async with services.database.reading() as db:
            rows = await catalog.turns_of(db, trajectory_id, selected)
        for row in rows:
            entries = await asyncio.to_thread(views.turn_entries, [row], texts, with_tokens=with_tokens)
            if not room.takes(entries):
                return found, selected.after
            found += entries
            selected = replace(selected, after=row.number)
        if len(rows) < TURNS_AT_ONCE:
            return found, None


async def _texts(services: Services) -> dict[str, ModelText]:
    return {base.key: await base.model.text.get() for base in services.bases.all}


def _last_turn(cursor: str | None) -> int:
    if cursor is None:
        return BEFORE_ALL
    if not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= MOST_DIGITS):
        raise InvalidRequest(
            f"cursor is {cursor[: listing.MOST_SHOWN]!r}; send one that the page before has given"
        )
    return int(cursor)


def _requests(text: str) -> list[str]:
    ids = text.split(",")
    if len(ids) > MOST_REQUESTS:
        raise InvalidRequest(
            f"turns_of names {len(ids)} requests; name {MOST_REQUESTS} at most, or ask again"
        )
    return ids
