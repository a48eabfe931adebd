"""Which frozen weights each sampler draws from, and how long they are kept.

A version lives until the last session that uses it has ended. What a sampler reads from disk are hard
links of its own, so that deleting or overwriting a checkpoint takes nothing away from an open sampler.
"""

import asyncio
import shutil
from pathlib import Path
from typing import Protocol

from spmd_tx.coordinator import checkpoint_files, folder_links
from spmd_tx.coordinator.bank import Placement, VersionBank
from spmd_tx.coordinator.checkpoint_catalog import OpenCheckpoint
from spmd_tx.coordinator.checkpoint_files import SAMPLER_WEIGHTS, CheckpointPath
from spmd_tx.coordinator.dispatch import BASE_MODEL, VersionKey
from spmd_tx.coordinator.tables import Sampler
from spmd_tx.errors import InvalidRequest
from spmd_tx.protocol import AdapterSpec


class Samplers(Protocol):
    """What is used of the catalog."""

    async def sampler(self, sampler_id: str) -> Sampler: ...


class Checkpoints(Protocol):
    """What is used of the checkpoint catalog."""

    async def open(self, path: CheckpointPath) -> OpenCheckpoint: ...


class Versions:
    """The versions in use, by sampler and by session."""

    def __init__(
        self, samplers: Samplers, checkpoints: Checkpoints, bank: VersionBank, directory: Path, max_rank: int
    ) -> None:
        self._samplers = samplers
        self._checkpoints = checkpoints
        self._bank = bank
        self._directory = directory
        self._max_rank = max_rank
        self._of_sampler: dict[str, VersionKey] = {}
        self._published: dict[CheckpointPath, VersionKey] = {}  # what this run saved under a name
        self._linked: set[VersionKey] = set()
        self._links = 0
        self._used_by: dict[str, set[VersionKey]] = {}  # by session
        self._opening = asyncio.Lock()

    async def of(self, sampler_id: str) -> VersionKey:
        """The version of a sampler, ready to be placed on the device. The first answer stays for ever."""
        if sampler_id not in self._of_sampler:
            async with self._opening:
                if sampler_id not in self._of_sampler:
                    self._of_sampler[sampler_id] = await self._find(await self._samplers.sampler(sampler_id))
        return self._of_sampler[sampler_id]

    def reserve(self, version: VersionKey, adapter: AdapterSpec, session_id: str) -> Placement:
        """A place on the device for a version that is about to be saved by a session."""
        self._use(version, session_id)
        return self._bank.reserve(version, adapter)

    def publish(self, path: CheckpointPath, version: VersionKey, adapter: AdapterSpec, folder: Path) -> None:
        """The version on the device is also the checkpoint under this path."""
        self._bank.register(version, adapter, str(folder))
        self._published[path] = version

    def end_session(self, session_id: str) -> list[Path]:
        """Forget what only this session used; return folders to delete once all sent commands are done."""
        unused = self._used_by.pop(session_id, set()) - set().union(*self._used_by.values())
        for version in unused:
            self._bank.forget(version)
        self._linked -= unused
        self._of_sampler = {id: version for id, version in self._of_sampler.items() if version not in unused}
        self._published = {
            path: version for path, version in self._published.items() if version not in unused
        }
        return self._bank.take_abandoned()

    async def _find(self, sampler: Sampler) -> VersionKey:
        if sampler.model_path is not None:
            return await self._open(checkpoint_files.parse(sampler.model_path), sampler.session_id)
        if sampler.model_id is None:
            return BASE_MODEL
        if not self._bank.knows(sampler.id):
            raise InvalidRequest(
                f"the weights of sampler {sampler.id} are not there: their save has not finished, "
                "or the session they belong to has ended; save them again"
            )
        self._use(sampler.id, sampler.session_id)
        return sampler.id

    async def _open(self, path: CheckpointPath, session_id: str) -> VersionKey:
        if path.kind != SAMPLER_WEIGHTS:
            raise InvalidRequest(
                f"checkpoint {path} cannot be sampled; use one that save_weights_for_sampler has saved "
                f"(tinker://RUN/{SAMPLER_WEIGHTS}/NAME)"
            )
        folder, manifest = await self._checkpoints.open(path)
        check_rank(path, manifest.adapter, self._max_rank)
        version = self._published.get(path, f"{path}#{manifest.created_at}")
        if version not in self._linked:
            self._links += 1
            place = self._directory / f"named-{self._links}"
            await asyncio.to_thread(folder_links.link, path, folder, place)
            self._bank.register(version, manifest.adapter, str(place))
            self._linked.add(version)
        self._use(version, session_id)
        return version

    def _use(self, version: VersionKey, session_id: str) -> None:
        self._used_by.setdefault(session_id, set()).add(version)


def check_rank(path: CheckpointPath, adapter: AdapterSpec, max_rank: int) -> None:
    if adapter.rank > max_rank:
        raise InvalidRequest(
            f"checkpoint {path} has rank {adapter.rank} and this server takes at most {max_rank}; "
            "the operator raises the limit with --max-lora-rank"
        )


def open_versions(
    samplers: Samplers, checkpoints: Checkpoints, bank: VersionBank, directory: Path, max_rank: int
) -> Versions:
    """Start with an empty directory: what an earlier run left there is of no use."""
    assert directory.is_absolute(), f"{directory} means another place to workers elsewhere"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return Versions(samplers, checkpoints, bank, directory, max_rank)
