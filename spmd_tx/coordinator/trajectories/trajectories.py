"""Opens the trajectories that calls sample in, and keeps what clients leave behind that have hung up."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from sqlalchemy import update
from sqlalchemy.exc import IntegrityError

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.tables import TrajectoryRow, TurnRow
from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.coordinator.trajectories import catalog
from spmd_tx.coordinator.trajectories.records import PartialTurn, encode_samples
from spmd_tx.coordinator.trajectories.trees import TrajectoryTrees
from spmd_tx.coordinator.trajectories.turn_rows import growth
from spmd_tx.coordinator.wire.trajectories import CreateTrajectoryRequest, TrajectoryName
from spmd_tx.errors import Forbidden, InvalidRequest

NAME = re.compile(get_args(TrajectoryName)[1].pattern)


@dataclass
class Trajectories:
    """Opens trajectories."""

    database: Database
    bounds: Bounds
    trees: TrajectoryTrees
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def open_to_sample(self, caller: Caller, name: str) -> TrajectoryRow:
        """Return the caller's trajectory of this name, which is made if there is none.

        Raises InvalidRequest if it takes no more turns, and Forbidden for a key of another one.
        """
        row = await self._named(caller, name)
        _check_key(caller, row, name)
        if row is None:
            row = await self._create(caller, name)
        most = self.bounds
        if row.finished_at is not None:
            raise InvalidRequest(
                f"the trajectory {row.name!r} is finished and takes no more turns; use another name"
            )
        if row.turns >= most.turns_per_trajectory:
            raise InvalidRequest(
                f"the trajectory {row.name!r} has {row.turns} turns, the most that one may have; use another "
                "name, or ask the operator to raise the limit turns_per_trajectory"
            )
        if row.size_bytes >= most.trajectory_bytes:
            raise InvalidRequest(
                f"the trajectory {row.name!r} has {row.size_bytes} bytes, and may have "
                f"{most.trajectory_bytes}; use another name, or ask the operator to raise the limit "
                "trajectory_bytes"
            )
        return row

    async def check_key(self, caller: Caller, name: str) -> None:
        """Raise Forbidden for a key of another trajectory than that of this name."""
        if caller.trajectory is not None:
            _check_key(caller, await self._named(caller, name), name)

    async def _named(self, caller: Caller, name: str) -> TrajectoryRow | None:
        async with self.database.reading() as db:
            return await catalog.by_name(db, caller.owner, name)

    async def _create(self, caller: Caller, name: str) -> TrajectoryRow:
        if NAME.fullmatch(name) is None:
            raise InvalidRequest(
                f"a trajectory cannot be called {name[: catalog.MOST_SHOWN]!r}; use up to 128 letters, "
                "digits and any of . _ @ + - after the first"
            )
        asked = CreateTrajectoryRequest(name)
        try:
            async with self.database.transaction() as db:
                found = await catalog.by_name(db, caller.owner, name)  # made by a call at the same time
                return found or await catalog.create(db, caller, asked, self.bounds)
        except IntegrityError:  # made beside this server
            found = await self._named(caller, name)
            assert found is not None
            return found

    def cut_later(self, trajectory_id: str, request_id: str, samples: Sequence[PartialTurn]) -> None:
        """Store what was drawn of a turn whose client has hung up."""
        task = asyncio.create_task(self._cut(trajectory_id, request_id, samples))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _cut(self, trajectory_id: str, request_id: str, samples: Sequence[PartialTurn]) -> None:
        contents = encode_samples(samples)
        now = clock.now()
        values = {
            "state": "cut",
            "finished_at": now,
            "samples": contents if samples else None,
            "sampled": sum(len(each.tokens) for each in samples),
        }
        async with self.database.transaction() as db:
            is_cut = TurnRow.request_id == request_id, TurnRow.state.in_(("open", "failed"))
            cut = await db.scalars(
                update(TurnRow).where(*is_cut).values(values).returning(TurnRow.request_id)
            )
            if samples and cut.all():
                await db.execute(growth(trajectory_id, len(contents), now))
        self.trees.forget(trajectory_id)

    async def close(self) -> None:
        """Wait for what is being stored."""
        if self._tasks:
            await asyncio.wait(self._tasks)


def _check_key(caller: Caller, row: TrajectoryRow | None, name: str) -> None:
    if caller.trajectory is not None and (row is None or row.id != caller.trajectory):
        raise Forbidden(
            f"this key samples in another trajectory than {name[: catalog.MOST_SHOWN]!r}, or that one was "
            "deleted; use the base URL that came with the key"
        )
