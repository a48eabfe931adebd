"""What samplers draw from: weights that these workers have, or that those of another group write for them."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from spmd_tx.coordinator.runtime.side_by_side import until_one_ends
from spmd_tx.coordinator.sampling.bank import VersionKey
from spmd_tx.coordinator.scheduler.dispatcher import Dispatcher
from spmd_tx.coordinator.scheduler.generation import GenerationParts
from spmd_tx.coordinator.storage.tables import SamplerRow
from spmd_tx.coordinator.training.line import ModelLine
from spmd_tx.errors import MeshError
from spmd_tx.protocol.reports import Reply


class WeightSupply:
    """Is one generation of workers to the store of versions: reads folders, and writes them if it trains."""

    def __init__(
        self,
        parts: GenerationParts,
        lines: dict[str, ModelLine],
        dispatcher: Dispatcher,
        wake: Callable[[], None],
    ) -> None:
        """``lines`` are those of the models that are there, by their id."""
        self.unsaved: set[str] = set()  # samplers whose weights only workers that train can make
        self._training, self._versions, self._trains = parts.training, parts.versions, parts.trains
        self._lines, self._dispatcher, self._wake = lines, dispatcher, wake
        self._loss: MeshError | None = None
        self._lost = asyncio.Event()

    def join(self) -> None:
        """Begin to read and write."""
        self._versions.store.join(self, self if self._trains else None)

    def lose(self, error: MeshError) -> None:
        """Wait for nothing any more: the workers are lost."""
        self._loss = error
        self._lost.set()

    def leave(self) -> None:
        self._versions.store.leave(self)

    def has_restored(self, sampler: SamplerRow) -> bool:
        """Whether the weights that were saved for a sampler are there."""
        entry = self._lines.get(sampler.model_id or "")
        return self._loss is None and entry is not None and entry.restored.is_set()

    async def restored(self, sampler: SamplerRow) -> None:
        """Wait until the weights that were saved for a sampler are there, if its model can be restored."""
        if sampler.model_id in self._lines:
            await self._lines[sampler.model_id].restored.wait()
        elif not self._trains:
            await self._supplied(sampler)
        if self._loss:
            raise self._loss

    async def _supplied(self, sampler: SamplerRow) -> None:
        """Wait until other workers have written what a sampler draws from, or these are lost."""
        supplying = self._versions.store.supply(sampler, self._versions.is_on_disk)
        self.unsaved.add(sampler.id)
        try:
            await until_one_ends([supplying, self._lost.wait()])
        finally:
            self.unsaved.discard(sampler.id)

    # --- for the store --------------------------------------------------------------------------------

    @property
    def last_reply(self) -> asyncio.Future[Reply] | None:
        return self._dispatcher.last_reply

    def reads(self, folder: Path) -> bool:
        return self._versions.reads(folder)

    def supersede(self, version: VersionKey) -> None:
        self._versions.supersede(version)
        self._wake()  # its folder may be deleted

    async def publish(self, sampler: SamplerRow) -> None:
        version = await self._versions.of(sampler.id, self.restored)
        while not self._versions.has_folder(version):
            entry = self._lines.get(sampler.model_id or "")
            if entry is None:
                raise self._loss or MeshError(f"{sampler.model_id} is not there any more")
            problem = await self._training.write_out(entry.model)
            if problem is not None:
                raise OSError(f"the weights of sampler {sampler.id} could not be written: {problem}")
