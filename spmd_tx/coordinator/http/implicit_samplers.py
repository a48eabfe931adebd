"""Samplers for calls without a session that name their weights each time, as OpenAI's do.

Each set of weights has a session of its own, which ends like any other when it is unused for a while.
"""

import asyncio
from dataclasses import dataclass, field
from itertools import count

from spmd_tx.coordinator.catalog.catalog import Catalog, SamplerWeights
from spmd_tx.coordinator.catalog.served_names import ServedNames
from spmd_tx.coordinator.http.security.access import Access
from spmd_tx.coordinator.storage.tables import SamplerRow
from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.coordinator.wire import checkpoint_paths
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.coordinator.wire.sessions import CreateSessionRequest
from spmd_tx.errors import NotFound

TAG = "openai"  # of the sessions, in listings
SCHEME = "tinker://"
BEHIND_BASE = ";"  # stands between a base and a checkpoint of it, in hosted Tinker's names


@dataclass(frozen=True)
class ImplicitSampler:
    """Holds a sampler, and numbers its requests."""

    row: SamplerRow
    numbers: count = field(default_factory=count)


class ImplicitSamplers:
    """Opens and keeps the samplers of this process. Those of earlier processes expire."""

    def __init__(self, catalog: Catalog, names: ServedNames) -> None:
        self._catalog = catalog
        self._names = names
        self._samplers: dict[tuple[str, str, float], ImplicitSampler] = {}  # by owner, name, time of saving
        self._opening = asyncio.Lock()

    async def find(self, model: str, access: Access) -> tuple[CheckpointPath | None, float]:
        """Return the path of the checkpoint that ``model`` names, and when it was saved.

        None and 0 mean the base model.

        Raises NotFound, or InvalidRequest when it cannot be sampled.
        """
        if model.startswith(SCHEME):
            path = checkpoint_paths.parse_to_sample(model)
            return path, (await access.open_checkpoint(path)).manifest.created_at
        base, _, path = model.partition(BEHIND_BASE)
        if path.startswith(SCHEME):
            await self.find(base, access)
            return await self.find(path, access)
        if self._names.find(model) is None:
            raise NotFound(
                f"the model {model[: checkpoint_paths.MOST_SHOWN]!r} does not exist; this server has "
                f"{self._names.names[0]!r}, and checkpoints of it under "
                f"{SCHEME}RUN/{checkpoint_paths.SAMPLER_WEIGHTS}/NAME"
            )
        return None, 0.0

    async def of(self, model: str, access: Access) -> ImplicitSampler:
        """Return a sampler for what ``find`` finds, as it is now."""
        path, saved_at = await self.find(model, access)
        async with self._opening:
            key = (access.caller.owner, model, saved_at)
            sampler = self._samplers.get(key)
            if sampler is None or await self._catalog.problem(sampler.row) is not None:
                sampler = self._samplers[key] = await self._open(path, access.caller)
        return sampler

    async def _open(self, path: CheckpointPath | None, caller: Caller) -> ImplicitSampler:
        self._samplers = {
            key: sampler
            for key, sampler in self._samplers.items()
            if not self._catalog.has_ended(sampler.row.session_id)
        }
        session = await self._catalog.create_session(CreateSessionRequest(tags=[TAG]), caller)
        weights = SamplerWeights(path and str(path))
        row = await self._catalog.add_sampler(session.id, 0, self._names.names[0], weights)
        return ImplicitSampler(row)
