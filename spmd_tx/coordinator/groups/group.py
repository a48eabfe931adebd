"""One group of workers: its mesh, its base model, and all that lives as long as it does."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.agent.agent import Agent
from spmd_tx.coordinator.bases.health import GroupHealth
from spmd_tx.coordinator.bases.served_base import ServedBase
from spmd_tx.coordinator.groups.of_base import GroupsOfBase
from spmd_tx.coordinator.mesh.generations import Generations
from spmd_tx.coordinator.mesh.hub import Hub
from spmd_tx.coordinator.mesh.program_uses import ProgramUses
from spmd_tx.coordinator.runtime import metrics
from spmd_tx.coordinator.runtime.side_by_side import until_one_ends
from spmd_tx.coordinator.sampling.shapes import SamplingShapes
from spmd_tx.coordinator.scheduler.scheduler import Scheduler
from spmd_tx.protocol.reports import Ready

LOOK_SECONDS = 0.1  # between looks whether a group that is drained is done

OnGroupReady = Callable[["WorkerGroup", Ready], None]


@dataclass(frozen=True, kw_only=True)
class WorkerGroup:
    """Holds the parts of a group, which hold nothing of other groups."""

    name: str
    config: ServerConfig
    base: ServedBase
    beside: GroupsOfBase  # those of its base model, this one too
    hub: Hub
    generations: Generations
    scheduler: Scheduler
    uses: ProgramUses
    health: GroupHealth
    agents: Sequence[Agent]  # of the processes on this host

    @property
    def trains(self) -> bool:
        return self.config.trains

    @property
    def is_ready(self) -> bool:
        """Whether its workers take new samples."""
        return self.health.ready and not self.health.is_leaving

    async def run(self, on_ready: OnGroupReady) -> None:
        """Work until the group cannot go on, or its agents were told to end.

        Raises StartError when its workers, its agents or its text can never work like this, and CrashLoop.
        """
        works: list[Coroutine[Any, Any, Any]] = [
            self.generations.run(partial(self._work, on_ready)),
            self.base.model.text.run(),
            self.uses.keep(),
            self._let_agents_go(),
            *(agent.run() for agent in self.agents),
        ]
        await until_one_ends(works)

    async def _work(self, on_ready: OnGroupReady, ready: Ready) -> NoReturn:
        """Serve requests, now that the workers of a generation are ready."""
        await self.base.model.text.get()
        self.beside.numbers.join(self.name, self._numerics(ready))
        self.health.ready, self.health.is_leaving = True, False
        metrics.GROUP_READY.labels(metrics.group()).set(1)
        on_ready(self, ready)
        self.beside.ready(self)
        works = self.scheduler.run(self.hub, ready.plan), self.beside.numbers.watch(self.name)
        try:
            await until_one_ends(works)
        finally:
            self.health.ready = False
            metrics.GROUP_READY.labels(metrics.group()).set(0)
            self.beside.lost(self)
        raise AssertionError("a scheduler ends with an error only")

    async def _let_agents_go(self) -> NoReturn:
        """Finish what an agent's worker is at before it has to leave, or move it, in half of the time."""
        while True:
            leaving = await self.generations.roster.leaving()
            self.health.is_leaving = True
            self.beside.leaves(self)
            with suppress(TimeoutError):  # the rest goes on elsewhere, or when there are workers again
                async with asyncio.timeout(leaving.seconds / 2):
                    if self.trains:
                        await self.scheduler.drain()
                    while self.health.ready and self.scheduler.has_samples:
                        await asyncio.sleep(LOOK_SECONDS)
            self.generations.roster.let_go(leaving.process)

    def _numerics(self, ready: Ready) -> dict[str, str]:
        """Return what decides the bits of results: what workers tell, and the sizes of blocks."""
        config, plan = self.config, ready.plan
        shapes = SamplingShapes(
            1,
            self.base.model.max_context,
            config.page_size,
            plan.decode_rows,
            on_cpu=plan.on_cpu,
            batch_invariant=config.batch_invariant,
        )
        blocks = {"tokens of a block": str(shapes.piece), "rows of a block": str(shapes.decode_block)}
        return ready.numerics | blocks
