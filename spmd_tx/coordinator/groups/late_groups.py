"""Opens the groups whose base model could not be read at the start, as soon as it can be."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.bases.health import GroupHealth, role_of
from spmd_tx.coordinator.bases.served_base import BaseHistory
from spmd_tx.coordinator.groups.group import WorkerGroup
from spmd_tx.coordinator.groups.run_groups import pause
from spmd_tx.coordinator.runtime import log_groups
from spmd_tx.coordinator.runtime.side_by_side import until_one_ends
from spmd_tx.errors import StartError


class LateGroup:
    """Holds what is known of a group without its base model. Routes see it as one that has failed."""

    def __init__(self, config: ServerConfig, history: BaseHistory, problem: str) -> None:
        """``problem`` says why its base model cannot be read."""
        self.config = config
        self.history = history
        self.health = GroupHealth(
            config.group, config.model_name, history.key, role_of(config), problem=problem
        )
        self.joined = asyncio.Event()  # an agent has asked to join: the files may be there now


class LateGroups:
    """Tries them again and again."""

    def __init__(
        self, groups: Sequence[LateGroup], open_group: Callable[[LateGroup], Awaitable[WorkerGroup]]
    ) -> None:
        self._groups = groups
        self._open_group = open_group

    async def run(self, run_group: Callable[[WorkerGroup], Coroutine[Any, Any, None]]) -> None:
        """Open each and run it. Ends as the first run of one does."""
        forever = asyncio.Event().wait()  # where there are none
        await until_one_ends([forever, *(self._open_and_run(late, run_group) for late in self._groups)])

    async def _open_and_run(
        self, late: LateGroup, run_group: Callable[[WorkerGroup], Coroutine[Any, Any, None]]
    ) -> None:
        with log_groups.entered(late.config.group):
            for failures in itertools.count(1):
                await pause(failures, str(late.health.problem), late.joined.wait())
                late.joined.clear()
                try:
                    group = await self._open_group(late)
                except StartError as error:
                    late.health.problem = str(error)
                else:
                    return await run_group(group)
