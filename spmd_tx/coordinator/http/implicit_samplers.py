"""Samplers for calls without a session that name their weights each time, as OpenAI's do.

Each set of weights has a session of its own, which ends like any other when it is unused for a while. A call
may also name a sampling session; to that, this server is one more client, with numbers of its own.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from sqlalchemy import Executable

from spmd_tx.coordinator.bases.bases import AskedBase, Bases, check_same_base
from spmd_tx.coordinator.bases.served_base import ServedBase
from spmd_tx.coordinator.catalog.catalog import Catalog, SamplerWeights, sampler_id
from spmd_tx.coordinator.http.security.access import Access
from spmd_tx.coordinator.storage.tables import SamplerRow
from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.coordinator.wire import checkpoint_paths
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.coordinator.wire.futures import SEQ_IDS_PER_CLIENT
from spmd_tx.coordinator.wire.sessions import CreateSessionRequest
from spmd_tx.errors import InvalidRequest, NotFound

StoredWith = Callable[[SamplerRow, int], Awaitable[Sequence[Executable]]]

TAG = "openai"  # of the sessions, in listings
SCHEME = "tinker://"
SAMPLER_ID = sampler_id("", "")  # what stands in every id of a sampling session
BEHIND_BASE = ";"  # stands between a base and a checkpoint of it, in hosted Tinker's names


class NamedWeights(NamedTuple):
    """Holds what a client names as its model."""

    base: ServedBase
    path: CheckpointPath | None = None  # of a checkpoint; None: the base model is meant
    saved_at: float = 0.0  # seconds since the epoch
    sampler: SamplerRow | None = None  # a sampling session that is named itself


@dataclass(frozen=True)
class ImplicitSampler:
    """Holds a sampler, and numbers its requests."""

    row: SamplerRow
    base: ServedBase
    numbers: count = field(default_factory=count)
    stored_with: StoredWith | None = None  # what is stored together with a request, by its number
    images: Mapping[str, bytes] = field(default_factory=dict)  # files of a request, by digest


class ImplicitSamplers:
    """Opens and keeps the samplers of this process. Those of earlier processes expire."""

    def __init__(self, catalog: Catalog, bases: Bases) -> None:
        self._catalog = catalog
        self._bases = bases
        self._samplers: dict[tuple[str, str, float], ImplicitSampler] = {}  # by owner, name, time of saving
        self._opening = asyncio.Lock()

    async def find(self, model: str, access: Access) -> NamedWeights:
        """Return the weights that ``model`` names: of a base model, a checkpoint or a sampling session.

        Raises NotFound, or InvalidRequest when it cannot be sampled.
        """
        if model.startswith(SCHEME):
            path = checkpoint_paths.parse_to_sample(model)
            base, opened = await access.open_checkpoint(path, self._bases)
            return NamedWeights(base, path, opened.manifest.created_at)
        name, _, behind = model.partition(BEHIND_BASE)
        if behind.startswith(SCHEME):
            wanted, found = await self.find(name, access), await self.find(behind, access)
            assert found.path is not None
            check_same_base(found.path, found.base, AskedBase(wanted.base, name))
            return found
        named = self._bases.find(model)
        if named is None and SAMPLER_ID in model:
            row = await access.sampler(model)
            return NamedWeights(self._bases.of_row(row.base_model), saved_at=row.created_at, sampler=row)
        if named is None:
            served = " and ".join(repr(base.name) for base in self._bases.all)
            raise NotFound(
                f"the model {model[: checkpoint_paths.MOST_SHOWN]!r} does not exist; this server has "
                f"{served}, and checkpoints of it under "
                f"{SCHEME}RUN/{checkpoint_paths.SAMPLER_WEIGHTS}/NAME"
            )
        return NamedWeights(named.base)

    async def of(self, model: str, access: Access) -> ImplicitSampler:
        """Return a sampler for what ``find`` finds, as it is now."""
        weights = await self.find(model, access)
        async with self._opening:
            key = (access.caller.owner, model, weights.saved_at)
            sampler = self._samplers.get(key)
            if sampler is None or await self._catalog.problem(sampler.row) is not None:
                sampler = self._samplers[key] = await self._open(weights, access.caller)
        return sampler

    async def _open(self, named: NamedWeights, caller: Caller) -> ImplicitSampler:
        self._samplers = {
            key: sampler
            for key, sampler in self._samplers.items()
            if not self._catalog.has_ended(sampler.row.session_id)
        }
        if named.sampler is not None:
            return await self._join(named.base, named.sampler)
        session = await self._catalog.create_session(CreateSessionRequest(tags=[TAG]), caller)
        weights = SamplerWeights(named.path and str(named.path))
        row = await self._catalog.add_sampler(session.id, 0, named.base.name, weights)
        return ImplicitSampler(row, named.base)

    async def _join(self, base: ServedBase, row: SamplerRow) -> ImplicitSampler:
        problem = await self._catalog.problem(row)
        if problem is not None:
            raise InvalidRequest(problem)
        client = await self._catalog.join_sampler(row)
        return ImplicitSampler(row, base, count(client * SEQ_IDS_PER_CLIENT))
