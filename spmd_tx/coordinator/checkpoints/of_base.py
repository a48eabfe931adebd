"""Saves and opens the checkpoints of models of one base."""

from dataclasses import dataclass
from pathlib import Path

from spmd_tx.coordinator.checkpoints.catalog import CheckpointCatalog, SaveOptions
from spmd_tx.coordinator.checkpoints.checkpoint_base import CheckpointBase
from spmd_tx.coordinator.checkpoints.files import Manifest
from spmd_tx.coordinator.checkpoints.store import OpenCheckpoint
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.protocol.commands import AdapterSpec


@dataclass(frozen=True)
class BaseCheckpoints:
    """Is the catalog for models of one base. Methods raise what those of the catalog raise."""

    catalog: CheckpointCatalog
    base: CheckpointBase

    async def begin(self, path: CheckpointPath, options: SaveOptions) -> Path:
        return await self.catalog.begin(path, options)

    async def complete(
        self, path: CheckpointPath, staged: Path, adapter: AdapterSpec, options: SaveOptions
    ) -> Manifest:
        return await self.catalog.complete(path, staged, adapter, options, self.base)

    async def open(self, path: CheckpointPath) -> OpenCheckpoint:
        return await self.catalog.open(path, self.base)
