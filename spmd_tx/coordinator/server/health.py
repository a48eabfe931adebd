"""Whether a request would be served now, as the routes see it."""

import asyncio
from collections.abc import Sequence

from spmd_tx.coordinator.groups.health import GroupHealth
from spmd_tx.coordinator.groups.late_groups import LateGroup
from spmd_tx.coordinator.wire.sessions import ProgramsHealth


class ServerHealth:
    """Holds what the server sets as it ends, beside what is known of its groups."""

    def __init__(self, groups: Sequence[GroupHealth | LateGroup]) -> None:
        self.groups = list(groups)
        self.refusal: str | None = None  # why no more work is taken
        self.closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def replace(self, late: LateGroup, opened: GroupHealth) -> None:
        """Note that a group could be opened."""
        self.groups[self.groups.index(late)] = opened

    @property
    def ready(self) -> bool:
        """Whether any workers run commands."""
        return any(group.ready for group in self.groups)

    @property
    def phase(self) -> str:
        """What the server is doing: "loading weights 45 %"."""
        if len(self.groups) == 1:
            return self.groups[0].phase
        return "; ".join(f"{group.name}: {group.phase}" for group in self.groups)

    def problem_of(self, base: str) -> str | None:
        """Say why nothing can be carried out on a base model, by its key; None: it can, sooner or later."""
        groups = [group for group in self.groups if group.base_key == base]
        if not groups or any(group.problem is None for group in groups):
            return None
        return "; ".join(f"group {group.name} has {group.phase}" for group in groups)

    @property
    def programs(self) -> ProgramsHealth | None:
        """How much of what the first group compiles ahead is ready; None without a warm-up."""
        return self.groups[0].programs
