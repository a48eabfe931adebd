"""Sampler versions: the frozen weights that each sampler draws from, and how long they are kept.

A version lives until the last session that uses it has ended. A sampler reads hard links of its own, so
deleting or overwriting a checkpoint does not affect an open sampler. Folders outlive the workers and this
process; versions that were only on the device come back with their model. A sampler of kind inflight draws
from the newest version of its model.

Where other groups sample what this one trains, unnamed versions are written to disk with their save, for
them to load (version_store.py).
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from spmd_tx.coordinator.catalog.catalog import Catalog
from spmd_tx.coordinator.checkpoints import files
from spmd_tx.coordinator.checkpoints.store import OpenCheckpoint
from spmd_tx.coordinator.checkpoints.writes import Writes, Writing
from spmd_tx.coordinator.runtime.folder_names import folder_name
from spmd_tx.coordinator.sampling.bank import BASE_MODEL, Placement, VersionBank, VersionKey
from spmd_tx.coordinator.sampling.inflight_versions import InflightVersions
from spmd_tx.coordinator.sampling.version_store import FROM_DISK, VersionStore
from spmd_tx.coordinator.storage.tables import SamplerRow
from spmd_tx.coordinator.wire import checkpoint_paths
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.errors import UNREADABLE, InvalidRequest
from spmd_tx.models.adapter_formats.files import group_of_module
from spmd_tx.protocol.commands import AdapterSpec, AnyCommand
from spmd_tx.protocol.places import WeightsFolder
from spmd_tx.protocol.programs import ProgramShape


@dataclass
class WriteOut:
    """Has a model's versions that are not on disk written there, unless that has begun."""

    versions: "Versions"
    model_id: str
    writing: list[Writing] = field(default_factory=list)  # what the commands write, once they are made
    _commands: list[AnyCommand] | None = None

    def programs(self) -> list[ProgramShape]:
        """Return the programs of the commands that would be made now."""
        return self.versions.programs_to_write_out(self.model_id)

    def commands(self) -> list[AnyCommand]:
        """Make the commands, which are to be sent now; the same ones again if sending them has failed."""
        if self._commands is None:
            self._commands, self.writing = self.versions.write_out(self.model_id)
        return self._commands

    async def problem(self) -> str | None:
        """Wait until all folders are complete; return why one could not be written."""
        if self.writing:
            await asyncio.wait(self.writing)
        return next((problem for each in self.writing if (problem := each.result()) is not None), None)


Restored = Callable[[SamplerRow], Awaitable[None]]
OpenNamed = Callable[[CheckpointPath], Awaitable[OpenCheckpoint]]


@dataclass(eq=False)
class Versions:
    """Holds the versions in use, by sampler and by session, in one generation of workers."""

    samplers: Catalog
    open_checkpoint: OpenNamed
    bank: VersionBank
    store: VersionStore
    max_rank: int
    writes: Writes
    _of_sampler: dict[str, VersionKey] = field(default_factory=dict)
    # Saved under a name by this generation
    _published: dict[CheckpointPath, VersionKey] = field(default_factory=dict)
    _linked: set[VersionKey] = field(default_factory=set)
    # By model, saved by this generation, not on disk; and those of them that are being written
    _ephemeral: dict[str, set[VersionKey]] = field(default_factory=dict)
    _writing: dict[VersionKey, Writing] = field(default_factory=dict)
    _used_by: dict[str, set[VersionKey]] = field(default_factory=dict)  # by session
    _retired: set[str] = field(default_factory=set)  # samplers

    def __post_init__(self) -> None:
        self.inflight = InflightVersions(self._give_up)

    async def of(self, sampler_id: str, restored: Restored) -> VersionKey:
        """Return the version of a sampler, which the bank can place on the device from then on.

        It never changes, except that a sampler of kind inflight gets its model's newest version.
        ``restored`` returns when the versions of a sampler's model are there again.
        """
        if not self.bank.knows(self._of_sampler.get(sampler_id, "")):  # or not any more
            self._of_sampler.pop(sampler_id, None)
            sampler = await self.samplers.sampler(sampler_id)
            if sampler.model_id is not None:
                await restored(sampler)
                if sampler.inflight:
                    return await self._newest(sampler, sampler.model_id, restored)
            async with self.store.opening:
                if sampler_id not in self._of_sampler:
                    self._of_sampler[sampler_id] = await self._find(sampler)
        return self._of_sampler[sampler_id]

    def known(self, sampler_id: str) -> VersionKey | None:
        """Return the version of a sampler that was looked up before; None: it has to be."""
        version = self._of_sampler.get(sampler_id)
        return version if version is not None and self.bank.knows(version) else None

    def reserve(
        self, version: VersionKey, adapter: AdapterSpec, session_id: str, model_id: str | None = None
    ) -> Placement:
        """Reserve a slot for a version that a session will save; ``model_id`` if it is ephemeral."""
        self._use(version, session_id)
        if model_id is not None:
            self._ephemeral.setdefault(model_id, set()).add(version)
        return self.bank.reserve(version, adapter)

    def aside(self, version: VersionKey, model_id: str) -> WeightsFolder | None:
        """Return where the save of a reserved version writes it for other groups; None: nowhere.

        A folder that is there is of the same weights: the save is run again.
        """
        folder = self._folder(version)
        if not self.store.is_shared or version not in self._ephemeral.get(model_id, ()):
            return None
        if folder.exists():
            self._has_folder(model_id, version, folder)
            return None
        self._expect(model_id, version, folder)
        return WeightsFolder(str(folder))

    def write_out(self, model_id: str) -> tuple[list[AnyCommand], list[Writing]]:
        """Return the commands that write a model's versions to disk, and what is being written."""
        commands: list[AnyCommand] = []
        versions = sorted(self._ephemeral.get(model_id, ()))
        for version in versions:
            begun = None if version in self._writing else self.bank.write_out(version)
            if begun is not None:
                commands += begun[0]
                self._expect(model_id, version, begun[1])
        return commands, [self._writing[each] for each in versions if each in self._writing]

    def has_folder(self, version: VersionKey) -> bool:
        """Whether a version is on disk, or is the base model."""
        return version == BASE_MODEL or self.bank.folder(version) is not None

    def reads(self, folder: Path) -> bool:
        """Whether a folder may be loaded, or is being written."""
        return self.bank.reads(folder) or folder.name in map(folder_name, self._writing)

    def supersede(self, version: VersionKey) -> None:
        """Forget a version that another group has given up, when no request samples from it."""
        self._unlist({version})
        self.bank.supersede(version)

    def _expect(self, model_id: str, version: VersionKey, folder: Path) -> None:
        """Expect the folder of a version. Call this before the command that has it written is sent."""
        writing = self._writing[version] = self.store.timed(self.writes.expect(folder))
        weights = self.bank.weights(version)
        writing.add_done_callback(partial(self._note_written, model_id, version, weights, folder))

    def _note_written(
        self, model_id: str, version: VersionKey, weights: str, folder: Path, writing: Writing
    ) -> None:
        del self._writing[version]
        if writing.cancelled() or writing.exception() is not None:  # the workers are lost
            return
        if not self.bank.knows(version) or self.bank.weights(version) != weights:
            self.store.discard([folder])
        elif writing.result() is None:
            self._has_folder(model_id, version, folder)

    def _has_folder(self, model_id: str, version: VersionKey, folder: Path) -> None:
        self.bank.note_folder(version, folder)
        self._ephemeral.get(model_id, set()).discard(version)
        session_id = next((id for id, used in self._used_by.items() if version in used), "")
        self.store.note_written(model_id, session_id, version, self.inflight.seq_id_of(model_id, version))

    def programs_to_write_out(self, model_id: str) -> list[ProgramShape]:
        """Return the programs of the commands that ``write_out`` would begin with."""
        return self.bank.programs_to_write_out(self._ephemeral.get(model_id, set()) - self._writing.keys())

    async def is_on_disk(self, sampler: SamplerRow) -> bool:
        """Whether a file has what a sampler of saved weights draws from, or it was given up."""
        assert sampler.model_id is not None
        newest = await self.samplers.inflight_samplers(sampler.model_id) if sampler.inflight else [sampler.id]
        adapter = await asyncio.to_thread(_read_adapter, self._folder(newest[0]))
        return adapter is not None or newest[0] in self._retired

    async def find_on_disk(self, version: VersionKey, session_id: str) -> bool:
        """Register a version that an earlier generation wrote to disk; return whether there is one."""
        folder = self._folder(version)
        async with self.store.lock:
            adapter = await asyncio.to_thread(_read_adapter, folder)
            if adapter is not None:
                self.bank.register(version, adapter, str(folder))
                self._use(version, session_id)
        return adapter is not None

    def publish(self, path: CheckpointPath, version: VersionKey, adapter: AdapterSpec, folder: Path) -> None:
        """Register the version on the device as the checkpoint under this path."""
        self.bank.register(version, adapter, str(folder))
        self._published[path] = version

    def end_session(self, session_id: str) -> list[Path]:
        """Forget versions that only this session used; return folders as VersionBank.take_abandoned does."""
        unused = self._used_by.pop(session_id, set()) - set().union(*self._used_by.values())
        for version in unused:
            self.bank.forget(version)
        self._linked -= unused
        self.inflight.forget(unused)
        self.store.end_session(session_id)
        self._of_sampler = {id: version for id, version in self._of_sampler.items() if version not in unused}
        self._published = {
            path: version for path, version in self._published.items() if version not in unused
        }
        return self.bank.take_abandoned()

    def retire(self, samplers: Iterable[str]) -> list[Path]:
        """Forget the ephemeral versions of samplers; return folders as VersionBank.take_abandoned does."""
        retired = set(samplers) - self._retired
        for sampler_id in retired:
            self._of_sampler.pop(sampler_id, None)
            self.bank.forget(sampler_id)
        self._unlist(retired)
        self._retired |= retired
        on_disk = [self._folder(sampler_id) for sampler_id in retired]
        return list({*self.bank.take_abandoned(), *on_disk})

    async def _find(self, sampler: SamplerRow) -> VersionKey:
        if sampler.model_path is not None:
            return await self._open(checkpoint_paths.parse_to_sample(sampler.model_path), sampler)
        if sampler.model_id is None:
            return BASE_MODEL
        if self.bank.knows(sampler.id):
            self._use(sampler.id, sampler.session_id)
        elif sampler.id in self._retired or not await self.find_on_disk(sampler.id, sampler.session_id):
            raise self._missing(sampler)
        return sampler.id

    async def _newest(self, sampler: SamplerRow, model_id: str, restored: Restored) -> VersionKey:
        """Return the version that the model's last inflight save published."""
        newest = self.inflight.newest(model_id)
        if newest is None or self.inflight.seq_id_of(model_id, newest) == FROM_DISK:
            written = await self._newest_written(sampler, model_id, restored)
            if written is not None:
                return written
        if newest is None:  # it may precede the restored snapshot
            for version in await self.samplers.inflight_samplers(model_id):
                if await self.find_on_disk(version, sampler.session_id):
                    self.inflight.publish(model_id, FROM_DISK, version)
                    break
        version = self.inflight.newest(model_id)
        if version is None:
            raise self._missing(sampler)
        return version

    async def _newest_written(
        self, sampler: SamplerRow, model_id: str, restored: Restored
    ) -> VersionKey | None:
        """Return the newest version that the group that trains has written; None: it is not known."""
        while (version := self.store.newest(model_id)) is not None:
            is_found = self.bank.knows(version) or await self.find_on_disk(version, sampler.session_id)
            if self.store.is_written(model_id, version):
                if not is_found:
                    raise self._missing(sampler)
                self.inflight.leave_disk(model_id, version)
                return version
            self.supersede(version)  # newer ones were written meanwhile
            await restored(sampler)
        return None

    def _give_up(self, version: VersionKey) -> None:
        self.supersede(version)
        self.store.supersede(version)

    def _unlist(self, versions: set[VersionKey]) -> None:
        for users in (self._used_by, self._ephemeral):
            for used in users.values():
                used -= versions

    def _missing(self, sampler: SamplerRow) -> InvalidRequest:
        return InvalidRequest(
            f"the weights of sampler {sampler.id} are not there: their save has not finished, their "
            "session has ended, or newer ones followed and these were unused for --keep-versions-hours, or "
            "unnamed on a server that trains all weights; save them again"
        )

    async def _open(self, path: CheckpointPath, sampler: SamplerRow) -> VersionKey:
        before = sampler.version  # from an earlier generation
        is_linked = before in self._linked
        if before is not None and (is_linked or await self.find_on_disk(before, sampler.session_id)):
            self._linked.add(before)
            self._use(before, sampler.session_id)
            return before
        version = await self._link(path)
        await self.samplers.set_version(sampler, version)
        self._use(version, sampler.session_id)
        return version

    async def _link(self, path: CheckpointPath) -> VersionKey:
        """Link the files of a checkpoint; if it is overwritten meanwhile, link the new version."""
        while True:
            folder, opened = await self.open_checkpoint(path)
            check_rank(path, opened.adapter, self.max_rank)
            version = self._published.get(path, f"{path}#{opened.created_at}")
            if version in self._linked:
                return version
            if await self._is_linked(version, opened.adapter):
                return version
            place = self._folder(version)
            async with self.store.lock:
                linked = await asyncio.to_thread(files.link, path, folder, place)
                if linked.version == opened.version:
                    self.bank.register(version, linked.adapter, str(place))
                    self._linked.add(version)
                    return version

    async def _is_linked(self, version: VersionKey, adapter: AdapterSpec) -> bool:
        """Register the folder of a version that another group has linked, and may be loading."""
        if not self.store.is_shared:
            return False
        place = self._folder(version)
        async with self.store.lock:
            is_there = await asyncio.to_thread(place.exists)
            if is_there:
                self.bank.register(version, adapter, str(place))
                self._linked.add(version)
        return is_there

    def _folder(self, version: VersionKey) -> Path:
        return self.store.directory / folder_name(version)

    def _use(self, version: VersionKey, session_id: str) -> None:
        self._used_by.setdefault(session_id, set()).add(version)


def check_rank(path: CheckpointPath, adapter: AdapterSpec, max_rank: int) -> None:
    """Raise InvalidRequest if this server cannot load the checkpoint; ``max_rank`` as in Limits."""
    if not adapter.rank and max_rank:
        raise InvalidRequest(
            f"checkpoint {path} holds all weights of a model and this server trains LoRA adapters; load it "
            "on a server with --full-parameters"
        )
    if adapter.rank and not max_rank:
        raise InvalidRequest(
            f"checkpoint {path} is a LoRA adapter and this server trains all weights (--full-parameters); "
            "load it on a server that trains adapters, or merge it with spmd-tx export and serve the result"
        )
    if adapter.rank > max_rank:
        raise InvalidRequest(
            f"checkpoint {path} has rank {adapter.rank} and this server takes at most {max_rank}; "
            "the operator raises the limit with --max-lora-rank"
        )


class _PeftConfig(msgspec.Struct):
    """Reads the fields of adapter_config.json that matter here."""

    r: int
    lora_alpha: float
    target_modules: list[str]


def _read_adapter(folder: Path) -> AdapterSpec | None:
    """Read the adapter of a folder, which is complete if it exists; None when it does not."""
    if (folder / "config.json").exists():
        return AdapterSpec(rank=0)
    try:
        config = msgspec.json.decode((folder / "adapter_config.json").read_bytes(), type=_PeftConfig)
    except (FileNotFoundError, *UNREADABLE):
        return None
    groups = {group_of_module(module) for module in config.target_modules}
    return AdapterSpec(
        rank=config.r,
        alpha=config.lora_alpha,
        train_attn="attn" in groups,
        train_mlp="mlp" in groups,
        train_unembed="unembed" in groups,
    )
