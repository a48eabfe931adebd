"""Opens the base models of groups, each once for all groups that have it."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.bases.served_base import ServedBase, open_base
from spmd_tx.coordinator.groups.of_base import GroupsOfBase
from spmd_tx.coordinator.groups.same_numbers import SameNumbers
from spmd_tx.coordinator.images.prepared import PreparedImages
from spmd_tx.coordinator.images.seen import RequestImages
from spmd_tx.coordinator.requests.logged_images import LoggedImages
from spmd_tx.coordinator.requests.queue import RequestQueue
from spmd_tx.coordinator.sampling.version_store import VersionStore
from spmd_tx.coordinator.server.group_builder import OpenedGroup
from spmd_tx.coordinator.server.served_model import OpenedModel


class OpenBases:
    """Holds those that were opened."""

    def __init__(
        self, config: ServerConfig, queue: RequestQueue, images: LoggedImages, stack: AsyncExitStack
    ) -> None:
        """``config`` has all groups. The stack closes what is opened."""
        self._images = images
        self._config = config
        self._queue = queue
        self._stack = stack
        self._opened: dict[tuple[str, ...], tuple[ServedBase, GroupsOfBase]] = {}  # by names

    async def of(self, group: ServerConfig, model: OpenedModel) -> OpenedGroup:
        """Open the base of a group, whose model was found."""
        names = group.model_names
        if names not in self._opened:
            beside = [each for each in self._config.all_groups if each.model_names == names]
            self._opened[names] = await self._open(beside, model)
        return OpenedGroup(group, model, *self._opened[names])

    async def _open(
        self, groups: Sequence[ServerConfig], model: OpenedModel
    ) -> tuple[ServedBase, GroupsOfBase]:
        """Make what the groups of a base model share."""
        first = next((group for group in groups if group.trains), groups[0])
        is_shared = first.trains and len(groups) > 1
        store = await asyncio.to_thread(VersionStore, first.data_dir / "versions", is_shared=is_shared)
        self._stack.push_async_callback(store.close)
        numbers = SameNumbers(first.group if first.trains else None, all_bits=first.batch_invariant)
        roles = [(group.group, group.trains) for group in groups]
        images = None
        if model.images is not None:
            prepared = PreparedImages(self._images, model.images, first.bounds)
            self._stack.push_async_callback(prepared.close)
            images = RequestImages(self._images, prepared)
        base = open_base(first, model, self._stack, history=model.history, images=images)
        return base, GroupsOfBase(self._queue, roles, store, numbers)
