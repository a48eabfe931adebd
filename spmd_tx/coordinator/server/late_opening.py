"""Sorts the groups by whether their base models can be read, and adds one to a server when it can be."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.bases.bases import Bases
from spmd_tx.coordinator.bases.health import GroupPhase, ServerHealth
from spmd_tx.coordinator.groups.group import WorkerGroup
from spmd_tx.coordinator.groups.late_groups import LateGroup
from spmd_tx.coordinator.groups.router import Router
from spmd_tx.coordinator.mesh.reception import Reception
from spmd_tx.coordinator.runtime import metrics
from spmd_tx.coordinator.server.base_records import history_of, known_bases
from spmd_tx.coordinator.server.group_builder import OpenedGroup, SharedParts, open_group
from spmd_tx.coordinator.server.open_bases import OpenBases
from spmd_tx.coordinator.server.served_model import OpenedModel, open_model
from spmd_tx.errors import UnreadableModel


async def sort_groups(
    config: ServerConfig, models: Sequence[OpenedModel | UnreadableModel], bases: OpenBases
) -> tuple[list[OpenedGroup], list[LateGroup]]:
    """Open the bases whose models were found. ``models`` are those of all groups.

    The result is the groups that can be opened, and those that cannot be yet.
    """
    opened, lates = list[OpenedGroup](), list[LateGroup]()
    for group, model in zip(config.all_groups, models, strict=True):
        if isinstance(model, UnreadableModel):
            history = await asyncio.to_thread(history_of, group)
            late = LateGroup(group, history, str(model))
            metrics.follow_state(group.group, get_args(GroupPhase), lambda late=late: late.health.state)
            lates.append(late)
        else:
            opened.append(await bases.of(group, model))
    return opened, lates


async def bases_of(config: ServerConfig, opened: Sequence[OpenedGroup], lates: Sequence[LateGroup]) -> Bases:
    """Return the bases that are served, which know why others are not."""
    known = [*await asyncio.to_thread(known_bases, config), *(late.history for late in lates)]
    found = {each.base.key: each.base for each in opened}  # several groups may have one
    bases = Bases(list(found.values()), known, config.model_name)
    bases.reasons |= {late.history.key: late.health.story for late in lates}
    return bases


@dataclass(frozen=True)
class LateOpening:
    """Adds a group to the parts of a server that know of groups."""

    shared: SharedParts
    groups: list[WorkerGroup]
    router: Router
    reception: Reception
    health: ServerHealth
    open_bases: OpenBases

    async def open(self, late: LateGroup) -> WorkerGroup:
        """Open a group and add it. Raises StartError if that still cannot be."""
        model = await asyncio.to_thread(open_model, late.config)
        opened = await self.open_bases.of(late.config, model)
        group = await open_group(opened, self.shared)
        if opened.base not in self.shared.bases.all:
            self.shared.bases.add(opened.base)
        self.router.add(group)
        self.reception.add(group.name, group.generations)
        self.health.replace(late.health, group.health)
        self.groups.append(group)
        return group
