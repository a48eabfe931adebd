"""Runs all groups beside each other; one that fails is tried again later, and the others go on."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Sequence

from spmd_tx.coordinator.groups.group import OnGroupReady, WorkerGroup
from spmd_tx.coordinator.runtime import log_groups
from spmd_tx.coordinator.runtime.side_by_side import until_one_ends
from spmd_tx.errors import CrashLoop, StartError
from spmd_tx.protocol.reports import Ready

logger = logging.getLogger(__name__)

PAUSES = (300.0, 600.0, 1800.0)  # seconds before a failed group is tried again; the last one stays


async def pause(failures: int, problem: object, another_agent: Awaitable[object]) -> None:
    """Wait until a group that failed is worth another try: some minutes, or until an agent joins."""
    seconds = PAUSES[min(failures, len(PAUSES)) - 1]
    logger.error("failed: %s; tried again in %g minutes, or when an agent joins", problem, seconds / 60)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(another_agent, seconds)


class GroupRuns:
    """Keeps the groups of a server at work."""

    def __init__(
        self, groups: Sequence[WorkerGroup], on_ready: OnGroupReady, *, has_others: bool = False
    ) -> None:
        """``has_others`` says whether groups may come to the sequence later."""
        self._groups = groups
        self._on_ready = on_ready
        self._has_several = has_others or len(groups) > 1
        self._failures: dict[str, int] = {}  # in a row, of the groups that have any

    async def run(self) -> None:
        """Return when agents were told to end. Raises StartError or CrashLoop when all groups have failed."""
        await until_one_ends(self.keep_running(group) for group in self._groups)

    async def keep_running(self, group: WorkerGroup) -> None:
        """Run one group until its agents were told to end, or until all groups have failed."""
        with log_groups.entered(group.name if self._has_several else None):
            is_again = False
            while True:
                try:
                    if is_again:
                        await group.generations.look_again()
                    await group.run(self._note_ready)
                    return
                except (StartError, CrashLoop) as error:
                    group.health.problem = str(error)
                    if all(each.health.problem is not None for each in self._groups):
                        raise self._of_all(error) from error
                    await self._pause(group, error)
                    is_again, group.health.problem = True, None

    async def _pause(self, group: WorkerGroup, error: StartError | CrashLoop) -> None:
        failures = self._failures[group.name] = self._failures.get(group.name, 0) + 1
        joining = asyncio.create_task(group.generations.roster.another())
        try:
            await group.generations.give_up(error)
            await pause(failures, error, joining)
        finally:
            joining.cancel()

    def _note_ready(self, group: WorkerGroup, ready: Ready) -> None:
        self._failures.pop(group.name, None)
        self._on_ready(group, ready)

    def _of_all(self, last: StartError | CrashLoop) -> StartError | CrashLoop:
        """Make the error of all groups, of which the last one has just failed."""
        if len(self._groups) == 1:
            return last
        problems = "; ".join(f"{group.name}: {group.health.problem}" for group in self._groups)
        return type(last)(f"all groups have failed: {problems}")
