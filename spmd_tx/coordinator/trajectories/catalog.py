"""Creates, finds, lists, rewards, finishes and deletes trajectories. SQL only."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
from sqlalchemy import delete, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage.tables import TrajectoryRow, TurnRow
from spmd_tx.coordinator.tenancy import audit
from spmd_tx.coordinator.tenancy.audit import AuditEvent
from spmd_tx.coordinator.tenancy.callers import Caller, is_seen
from spmd_tx.coordinator.wire.trajectories import CreateTrajectoryRequest, TrajectoryReward
from spmd_tx.errors import InvalidRequest, NotFound

ID_PREFIX = "trj_"
ID_BYTES = 12
REQUEST_ID_LENGTH = 32  # characters
IDS_AT_ONCE = 500  # of one query
MOST_SHOWN = 80  # characters of a name in a message
BEFORE_ALL = -1  # in place of the number of a turn


class TrajectoryCounts(NamedTuple):
    """Counts the turns and tokens of a trajectory, by the names that an entry has for them."""

    turns: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    roots: int = 0
    branches: int = 0


def not_there(name: str) -> NotFound:
    """Return the error for a trajectory that the caller does not have."""
    return NotFound(
        f"there is no trajectory {name[:MOST_SHOWN]!r}, or not any more: they are deleted some days after "
        "their last use"
    )


async def create(
    db: AsyncSession, caller: Caller, asked: CreateTrajectoryRequest, bounds: Bounds
) -> TrajectoryRow:
    """Create a trajectory. Raises InvalidRequest."""
    count = await db.scalar(
        select(func.count()).select_from(TrajectoryRow).where(TrajectoryRow.owner == caller.owner)
    )
    if (count or 0) >= bounds.trajectories:
        raise InvalidRequest(
            f"{caller.owner!r} has {count} trajectories, the most that one owner may have; delete some, or "
            "ask the operator to raise the limit trajectories"
        )
    id, now = ID_PREFIX + secrets.token_hex(ID_BYTES), clock.now()
    row = TrajectoryRow(
        id=id,
        owner=caller.owner,
        name=asked.name or id,
        created_at=now,
        used_at=now,
        model=asked.model,
        settings=msgspec.to_builtins(asked.settings),
        user_metadata=asked.user_metadata,
        turns=0,
        size_bytes=0,
    )
    db.add(row)
    try:
        await db.flush()
    except IntegrityError:
        raise InvalidRequest(
            f"there is a trajectory {row.name!r} already; choose another name, or delete it"
        ) from None
    audit.add(
        db, AuditEvent("trajectory_created", caller, caller.owner, {"trajectory": id, "name": row.name})
    )
    return row


async def by_name(db: AsyncSession, owner: str, name: str) -> TrajectoryRow | None:
    """Return an owner's trajectory, by its name or its id."""
    named = (TrajectoryRow.name == name) | (TrajectoryRow.id == name)
    found = (await db.scalars(select(TrajectoryRow).where(TrajectoryRow.owner == owner, named))).all()
    return min(found, key=lambda row: row.name != name, default=None)


async def find(db: AsyncSession, caller: Caller, id: str) -> TrajectoryRow:
    """Return a trajectory that the caller may see. Raises NotFound."""
    row = await db.get(TrajectoryRow, id)
    if row is None or not caller.sees(row.owner):
        raise not_there(id)
    return row


async def seen_of(db: AsyncSession, caller: Caller, ids: Sequence[str]) -> set[str]:
    """Return those of some ids that are of trajectories that a caller may see."""
    query = select(TrajectoryRow.id).where(is_seen(caller, TrajectoryRow.owner), TrajectoryRow.id.in_(ids))
    return set((await db.scalars(query)).all())


async def counts(db: AsyncSession, ids: Sequence[str]) -> dict[str, TrajectoryCounts]:
    """Count the turns and tokens of trajectories."""
    columns = (
        TurnRow.trajectory_id,
        func.count(),
        func.sum(TurnRow.reused + TurnRow.new),
        func.sum(TurnRow.reused),
        func.sum(TurnRow.cached),
        func.sum(TurnRow.sampled),
        func.count() - func.count(TurnRow.parent),
        func.count() - func.count(func.distinct(func.substr(TurnRow.parent, 1, REQUEST_ID_LENGTH))),
    )
    query = select(*columns).where(TurnRow.trajectory_id.in_(ids)).group_by(TurnRow.trajectory_id)
    return {
        row[0]: TrajectoryCounts(*(int(each or 0) for each in row[1:])) for row in await db.execute(query)
    }


async def newest_turns(db: AsyncSession, ids: Sequence[str]) -> dict[str, tuple[str, str | None]]:
    """Return model and weights of the newest turn of each trajectory."""
    newest = (
        select(func.max(TurnRow.number)).where(TurnRow.trajectory_id.in_(ids)).group_by(TurnRow.trajectory_id)
    )
    query = select(TurnRow.trajectory_id, TurnRow.model, TurnRow.weights).where(TurnRow.number.in_(newest))
    return {id: (model, weights) for id, model, weights in await db.execute(query)}


@dataclass(frozen=True, kw_only=True)
class TurnQuery:
    """Selects turns of a trajectory, in the order of acceptance."""

    request_ids: Sequence[str] | None = None  # None: of all requests
    after: int = BEFORE_ALL  # the number of the last turn of the page before
    most: int | None = None  # None: all


async def turns_of(
    db: AsyncSession, trajectory_id: str, selected: TurnQuery = TurnQuery()
) -> Sequence[TurnRow]:
    """Return turns of a trajectory, in the order of acceptance."""
    query = select(TurnRow).where(TurnRow.trajectory_id == trajectory_id, TurnRow.number > selected.after)
    if selected.request_ids is not None:
        query = query.where(TurnRow.request_id.in_(selected.request_ids))
    return (await db.scalars(query.order_by(TurnRow.number).limit(selected.most))).all()


async def outlines_of(db: AsyncSession, trajectory_id: str) -> Sequence[TurnRow]:
    """Return the turns of a trajectory without their prompts and samples, in the order of acceptance."""
    query = select(TurnRow).where(TurnRow.trajectory_id == trajectory_id).order_by(TurnRow.number)
    left_out = (defer(each, raiseload=True) for each in (TurnRow.prompt, TurnRow.samples))
    return (await db.scalars(query.options(*left_out))).all()


async def reward(db: AsyncSession, row: TrajectoryRow, given: TrajectoryReward) -> None:
    """Store a reward. Raises InvalidRequest for a turn that the trajectory does not have."""
    row.used_at = clock.now()
    if given.turn is None:
        row.reward, row.metrics = given.reward, given.metrics
        return
    request_id, _, number = given.turn.rpartition(":")
    turn = await db.get(TurnRow, request_id) if number.isdecimal() else None
    if turn is None or turn.trajectory_id != row.id:
        raise InvalidRequest(
            f"the trajectory {row.name!r} has no turn {given.turn!r}; send the ID of one, as REQUEST:0, or "
            "leave turn out to reward the whole trajectory"
        )
    entry = {"reward": given.reward, "metrics": given.metrics}
    turn.rewards = {**(turn.rewards or {}), str(int(number)): entry}


async def finish(db: AsyncSession, row: TrajectoryRow, caller: Caller) -> None:
    """Let a trajectory take no more turns. Doing it again changes nothing."""
    if row.finished_at is None:
        row.finished_at = row.used_at = clock.now()
        audit.add(db, AuditEvent("trajectory_finished", caller, row.owner, {"trajectory": row.id}))


async def remove(db: AsyncSession, row: TrajectoryRow, caller: Caller) -> None:
    """Delete a trajectory with its turns."""
    await db.execute(delete(TurnRow).where(TurnRow.trajectory_id == row.id))
    await db.delete(row)
    details = {"trajectory": row.id, "name": row.name}
    audit.add(db, AuditEvent("trajectory_deleted", caller, row.owner, details))


async def use(db: AsyncSession, ids: Sequence[str]) -> None:
    """Note that trajectories are used now, so that they are kept."""
    await db.execute(update(TrajectoryRow).where(TrajectoryRow.id.in_(ids)).values(used_at=clock.now()))


async def turns_among(db: AsyncSession, request_ids: Sequence[str]) -> set[str]:
    """Return which of these requests are turns."""
    found = set[str]()
    for start in range(0, len(request_ids), IDS_AT_ONCE):
        some = request_ids[start : start + IDS_AT_ONCE]
        found |= set((await db.scalars(select(TurnRow.request_id).where(TurnRow.request_id.in_(some)))).all())
    return found


async def forget(db: AsyncSession, unused_since: float) -> int:
    """Delete trajectories that were not used since then, and turns whose trajectory is gone; count them."""
    old = select(TrajectoryRow.id).where(TrajectoryRow.used_at < unused_since)
    await db.execute(delete(TurnRow).where(TurnRow.trajectory_id.in_(old)))
    await db.execute(delete(TurnRow).where(TurnRow.trajectory_id.not_in(select(TrajectoryRow.id))))
    gone = await db.execute(delete(TrajectoryRow).where(TrajectoryRow.used_at < unused_since))
    return gone.rowcount  # pyright: ignore[reportAttributeAccessIssue]
