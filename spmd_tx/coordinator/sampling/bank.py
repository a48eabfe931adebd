"""The sampler bank: LoRA versions in device slots, replaced least recently used first. Does no I/O.

Bank slot 0 is the base model. Rows may use all other slots but one, so that a save always finds a slot.
A version whose slot is given to another one waits in host memory, and comes back from there. Only one that
an earlier process or another model's owner has saved is read from its folder, once.

Where all weights are trained, a version is a copy of the whole model. Rows use one of them at a time, and one
that no request waits for is forgotten with its slot, or read from its folder again.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from spmd_tx.coordinator.runtime.folder_names import folder_name
from spmd_tx.coordinator.runtime.slot_pool import SlotPool
from spmd_tx.errors import InvalidRequest, NotLoaded
from spmd_tx.protocol.commands import AdapterSpec, AnyCommand, Drop, Move
from spmd_tx.protocol.places import BankSlot, Idle, WeightsFolder
from spmd_tx.protocol.programs import ProgramShape, program_of_move
from spmd_tx.protocol.reports import Reply

# Names one frozen set of weights to sample from: a sampler id for an ephemeral version, the checkpoint's
# tinker:// path for a named one, BASE_MODEL for the base model.
VersionKey = str
BASE_MODEL: VersionKey = "base"

BASE_BANK = 0
UNPLACED = -1

PAGE_OUT, PAGE_IN = program_of_move(BankSlot, Idle), program_of_move(Idle, BankSlot)
LOAD_SAMPLER = program_of_move(WeightsFolder, BankSlot)
WRITE_SAMPLER = program_of_move(BankSlot, WeightsFolder)


class Placement(NamedTuple):
    """Holds a version's slot and the commands to send, in order, before the first one that uses it."""

    bank: int  # UNPLACED: every slot is in use, ask again later
    before: list[AnyCommand]


@dataclass
class _Version:
    adapter: AdapterSpec
    path: str | None  # its folder; None: there is none yet
    number: int  # unique in this bank: a version that is saved again gets another one
    is_paged: bool = False  # whether the workers keep it in host memory
    requests: int = 0  # how many sample from it
    is_superseded: bool = False
    refusal: Reply | None = None  # of workers who did not load its folder


class VersionBank:
    """Assigns slots to versions. The least recently used slot goes first; slots that rows use stay."""

    def __init__(self, slots: int, directory: Path, *, whole_models: bool = False) -> None:
        """``directory`` is for versions that are written to disk without having a name.

        ``whole_models``: whether versions are copies of the whole model.
        """
        assert slots >= 3, f"a bank of {slots} slots; the base model, a version in use and a save take 3"
        self.pool = (
            SlotPool[VersionKey](slots, most_used=1)
            if whole_models
            else SlotPool[VersionKey](slots, shared=range(BASE_BANK + 1, slots), most_used=slots - 2)
        )
        self.pool.put(BASE_MODEL, BASE_BANK)
        self.size = 1 if whole_models else slots  # adapters that rows of a command can use, base model too
        self._pages_unused = not whole_models  # whether versions wait in host memory that no request needs
        self._versions: dict[VersionKey, _Version] = {}
        self._registered = 0
        self._directory = directory
        self._abandoned: list[Path] = []
        self._dropped: list[str] = []

    def register(self, version: VersionKey, adapter: AdapterSpec, path: str | None) -> None:
        """Add a version; ``path`` is its folder, if it has one. A known version keeps its slot."""
        if version not in self._versions:
            self._registered += 1
            self._versions[version] = _Version(adapter, path, self._registered)
        if path is not None:
            self._versions[version].path = path

    def note_folder(self, version: VersionKey, folder: Path) -> None:
        """Note that a version's folder is complete."""
        self._versions[version].path = str(folder)

    def folder(self, version: VersionKey) -> str | None:
        """Return a version's folder; None: it has none, or is not known."""
        known = self._versions.get(version)
        return None if known is None else known.path

    def reads(self, folder: Path) -> bool:
        """Whether a version that is known may be loaded from a folder."""
        return any(known.path == str(folder) for known in self._versions.values())

    def knows(self, version: VersionKey) -> bool:
        return version == BASE_MODEL or version in self._versions

    def weights(self, version: VersionKey) -> str:
        """Identify the version's present weights: the result changes when it is saved again."""
        return version if version == BASE_MODEL else f"{version}#{self._versions[version].number}"

    def reserve(self, version: VersionKey, adapter: AdapterSpec) -> Placement:
        """Return a slot for a version that will be saved there; forget an earlier one of this name."""
        self.forget(version)
        placement = self._vacate()
        self.register(version, adapter, None)
        self.pool.put(version, placement.bank)
        return placement

    def write_out(self, version: VersionKey) -> tuple[list[AnyCommand], Path] | None:
        """Return the commands that write a version to disk, and its folder; None if it has one.

        It gets a slot if it has none. ``note_folder`` is for when it is complete.
        """
        known = self._versions.get(version)
        if known is None or known.path is not None:
            return None
        bank, before = self._bring(version)
        folder = self._directory / folder_name(version)
        write = Move(source=BankSlot(bank), target=WeightsFolder(str(folder)), adapter=known.adapter)
        return [*before, write], folder

    def programs_to_reserve(self, version: VersionKey) -> list[ProgramShape]:
        """Return the programs of the commands that ``reserve`` would return."""
        bank = self.pool.slot_of(version)  # of an earlier version of this name, which is forgotten
        return self._programs_to_vacate() if bank is None or self.pool.has_users(bank) else []

    def programs_to_write_out(self, versions: Iterable[VersionKey]) -> list[ProgramShape]:
        """Return the programs of the commands that ``write_out`` would return."""
        known = {version: self._versions[version] for version in versions if version in self._versions}
        to_write = [version for version, each in known.items() if each.path is None]
        moves = [PAGE_IN, PAGE_OUT] if any(self.pool.slot_of(each) is None for each in to_write) else []
        return [WRITE_SAMPLER, *moves] if to_write else []

    def programs_to_place(self, version: VersionKey) -> list[ProgramShape]:
        """Return the programs of the commands that ``place`` would return, if it finds a slot."""
        if self.pool.slot_of(version) is not None:
            return []
        source = PAGE_IN if self._versions[version].is_paged else LOAD_SAMPLER
        return [source, *self._programs_to_vacate()]

    def place(self, version: VersionKey) -> Placement:
        """Return the slot for new rows of a version, with the command that loads it if necessary.

        When all slots are in use, the one that has been so for longest takes no new rows until the next
        round: a version that waits gets it when its rows have ended.
        """
        if not self.pool.may_pin(self.pool.slot_of(version)):
            return Placement(UNPLACED, [])
        placement = self._bring(version)
        self.pool.touch(placement.bank)
        return placement

    def refuse(self, folder: str, refusal: Reply) -> VersionKey | None:
        """Note that workers did not load a folder. Return its version, which has no slot any more."""
        for version, known in self._versions.items():
            if known.path == folder:
                known.refusal, known.is_paged = refusal, False
                if self.pool.slot_of(version) is not None:
                    self.pool.remove(version)
                return version
        return None

    def check(self, version: VersionKey) -> None:
        """Raise InvalidRequest or NotLoaded if a version cannot be sampled from."""
        if not self.knows(version):
            raise InvalidRequest(
                "the weights of this sampler are gone, because newer ones were saved; save them again, "
                "with a name to keep them"
            )
        if version in self._versions and (refusal := self._versions[version].refusal) is not None:
            raise not_loaded(refusal)

    def hold(self, version: VersionKey) -> None:
        """Keep a version for a request until ``let_go``."""
        if version in self._versions:
            self._versions[version].requests += 1

    def let_go(self, version: VersionKey) -> None:
        """End a request's hold on a version."""
        if version in self._versions:
            self._versions[version].requests -= 1
            self._forget_if_unused(version)

    def supersede(self, version: VersionKey) -> None:
        """Forget a version as soon as no request holds it; no more requests will come for it."""
        if version in self._versions:
            self._versions[version].is_superseded = True
            self._forget_if_unused(version)

    def forget(self, version: VersionKey) -> None:
        """Drop a version. Resident samples continue to their end."""
        known = self._versions.pop(version, None)
        if known is None:
            return
        if self.pool.slot_of(version) is not None:
            self.pool.remove(version)
        if known.is_paged:
            self._dropped.append(f"{version}#{known.number}")
        if known.path is not None and Path(known.path).parent == self._directory:
            self.abandon(Path(known.path))

    def abandon(self, folder: Path) -> None:
        """Let the folder of a forgotten version be deleted."""
        self._abandoned.append(folder)

    def take_abandoned(self) -> list[Path]:
        """Return folders of forgotten versions, to delete once all commands sent so far are executed."""
        abandoned, self._abandoned = self._abandoned, []
        return abandoned

    def take_dropped(self) -> list[AnyCommand]:
        """Return the commands that make workers forget versions in host memory."""
        dropped, self._dropped = self._dropped, []
        return [Drop(places=list(map(Idle, dropped)))] if dropped else []

    def _forget_if_unused(self, version: VersionKey) -> None:
        known = self._versions[version]
        if known.is_superseded and not known.requests:
            self.forget(version)

    def _vacate(self) -> Placement:
        """Empty the least recently used slot; return it with the commands that this takes."""
        bank = self._next_slot()
        assert bank is not None, "rows use all slots, although one is kept for saves"
        version = self.pool.content_of(bank)
        if version is None:
            return Placement(bank, [])
        known = self._versions[version]
        self.pool.remove(version)
        if known.requests or self._pages_unused:
            known.is_paged = True
            return Placement(bank, [Move(source=BankSlot(bank), target=Idle(self.weights(version)))])
        if known.path is None:
            self.forget(version)
        return Placement(bank, [])

    def _bring(self, version: VersionKey) -> Placement:
        """Return a version's slot, with the commands that move it there if it has none."""
        bank = self.pool.slot_of(version)
        if bank is not None:
            return Placement(bank, [])
        known = self._versions[version]
        assert known.path or known.is_paged, f"version {version} is neither with the workers nor on disk"
        bank, before = self._vacate()
        self.pool.put(version, bank)
        source = Idle(self.weights(version)) if known.is_paged else WeightsFolder(known.path or "")
        known.is_paged = False
        load = Move(source=source, target=BankSlot(bank), adapter=known.adapter)
        return Placement(bank, [*before, load])

    def _programs_to_vacate(self) -> list[ProgramShape]:
        bank = self._next_slot()
        return [] if bank is None or self.pool.content_of(bank) is None else [PAGE_OUT]

    def _next_slot(self) -> int | None:
        """Return the slot to use next; the base model stays."""
        return self.pool.next_slot(lambda version: None if version == BASE_MODEL else ())


def not_loaded(reply: Reply) -> NotLoaded:
    """Return the error of all samples whose weights were refused."""
    message = f"the weights of this sampler were not loaded: {reply.refusal}"
    return NotLoaded(message, is_damage=reply.is_damage)
