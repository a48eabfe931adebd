"""The sampler bank: LoRA versions in device slots, replaced least recently used first. Does no I/O.

Bank slot 0 is the base model. Rows may use all other slots but one, so that a save always finds a slot.
A version whose slot is given to another one waits in host memory, and comes back from there. Only one that
an earlier process or another model's owner has saved is read from its folder, once.

Where all weights are trained, a version is a copy of the whole model. Rows use one of them at a time, and one
that no request waits for is forgotten with its slot, or read from its folder again.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from spmd_tx.coordinator.runtime.folder_names import folder_name
from spmd_tx.protocol.commands import AdapterSpec, AnyCommand, Drop, Move
from spmd_tx.protocol.places import BankSlot, Idle, WeightsFolder
from spmd_tx.protocol.programs import ProgramShape, program_of_move

# Names one frozen set of weights to sample from: a sampler id for an ephemeral version, the checkpoint's
# tinker:// path for a named one, BASE_MODEL for the base model.
VersionKey = str
BASE_MODEL: VersionKey = "base"

BASE_BANK = 0
UNPLACED = -1

PAGE_OUT, PAGE_IN = program_of_move(BankSlot, Idle), program_of_move(Idle, BankSlot)
LOAD_SAMPLER = program_of_move(WeightsFolder, BankSlot)
WRITE_SAMPLER = program_of_move(BankSlot, WeightsFolder)


@dataclass(frozen=True)
class Placement:
    """Holds a version's slot and the commands to send, in order, before the first one that uses it."""

    bank: int  # UNPLACED: every slot is in use, ask again later
    before: list[AnyCommand] = field(default_factory=list)


@dataclass
class _Version:
    adapter: AdapterSpec
    path: str | None  # its folder; None: there is none yet
    number: int  # unique in this bank: a version that is saved again gets another one
    bank: int = UNPLACED
    is_paged: bool = False  # whether the workers keep it in host memory
    requests: int = 0  # how many sample from it
    is_superseded: bool = False


@dataclass
class _Slot:
    version: VersionKey | None = None
    users: int = 0  # resident samples that use it
    used_at: int = 0
    in_use_since: int = 0


class VersionBank:
    """Assigns slots to versions. The least recently used slot goes first; slots that rows use stay."""

    def __init__(self, slots: int, directory: Path, *, is_of_models: bool = False) -> None:
        """``directory`` is for versions that are written to disk without having a name.

        ``is_of_models``: whether versions are copies of the whole model.
        """
        assert slots >= 3, f"a bank of {slots} slots; the base model, a version in use and a save take 3"
        self._slots = {bank: _Slot() for bank in range(BASE_BANK + 1, slots)}
        self._base = _Slot(BASE_MODEL)
        self._is_of_models = is_of_models
        self._versions: dict[VersionKey, _Version] = {}
        self._directory = directory
        self._abandoned: list[Path] = []
        self._dropped: list[str] = []
        self._yielding: set[int] = set()
        self._time = 0

    @property
    def size(self) -> int:
        """Number of adapters that rows of a command can use, with that of the base model."""
        return 1 if self._is_of_models else len(self._slots) + 1

    def register(self, version: VersionKey, adapter: AdapterSpec, path: str | None) -> None:
        """Add a version; ``path`` is its folder, if it has one. A known version keeps its slot."""
        known = self._versions.setdefault(version, _Version(adapter, path, self._tick()))
        if path is not None:
            known.path = path

    def note_folder(self, version: VersionKey, folder: Path) -> None:
        """Note that a version's folder is complete."""
        self._versions[version].path = str(folder)

    def knows(self, version: VersionKey) -> bool:
        return version == BASE_MODEL or version in self._versions

    def weights(self, version: VersionKey) -> str:
        """Identify the version's present weights: the result changes when it is saved again."""
        return version if version == BASE_MODEL else f"{version}#{self._versions[version].number}"

    def reserve(self, version: VersionKey, adapter: AdapterSpec) -> Placement:
        """Return a slot for a version that will be saved there; forget an earlier one of this name."""
        self.forget(version)
        bank, before = self._vacate()
        self._versions[version] = _Version(adapter, None, self._tick())
        self._move_in(version, bank)
        return Placement(bank, before)

    def write_out(self, version: VersionKey) -> tuple[list[AnyCommand], Path] | None:
        """Return the commands that write a version to disk, and its folder; None if it has one.

        It gets a slot if it has none. ``note_folder`` is for when it is complete.
        """
        known = self._versions.get(version)
        if known is None or known.path is not None:
            return None
        before: list[AnyCommand] = []
        if known.bank == UNPLACED:
            before = self._bring(version, known)
        folder = self._directory / folder_name(version)
        write = Move(source=BankSlot(known.bank), target=WeightsFolder(str(folder)), adapter=known.adapter)
        return [*before, write], folder

    def programs_to_reserve(self, version: VersionKey) -> list[ProgramShape]:
        """Return the programs of the commands that ``reserve`` would return."""
        known = self._versions.get(version)
        leaves = None if known is None else self._slots.get(known.bank)
        return self._programs_to_vacate() if leaves is None or leaves.users else []

    def programs_to_write_out(self, versions: Iterable[VersionKey]) -> list[ProgramShape]:
        """Return the programs of the commands that ``write_out`` would return."""
        known = [self._versions[version] for version in versions if version in self._versions]
        to_write = [each for each in known if each.path is None]
        moves = [PAGE_IN, PAGE_OUT] if any(each.bank == UNPLACED for each in to_write) else []
        return [WRITE_SAMPLER, *moves] if to_write else []

    def programs_to_place(self, version: VersionKey) -> list[ProgramShape]:
        """Return the programs of the commands that ``place`` would return, if it finds a slot."""
        if version == BASE_MODEL or self._versions[version].bank != UNPLACED:
            return []
        source = PAGE_IN if self._versions[version].is_paged else LOAD_SAMPLER
        return [source, *self._programs_to_vacate()]

    def new_round(self) -> None:
        """Let all slots take new rows again, also those that were to yield to waiting versions."""
        self._yielding.clear()

    def place(self, version: VersionKey) -> Placement:
        """Return the slot for new rows of a version, with the command that loads it if necessary.

        When all slots are in use, the one that has been so for longest takes no new rows until the next
        round: a version that waits gets it when its rows have ended.
        """
        if version == BASE_MODEL and not self._is_of_models:
            return Placement(BASE_BANK)
        known = self._versions.get(version)
        bank = BASE_BANK if known is None else known.bank
        if bank != UNPLACED and bank in self._yielding:
            return Placement(UNPLACED)
        if not self._may_use_another(bank):
            self._yield_one()
            return Placement(UNPLACED)
        if known is None:
            return Placement(BASE_BANK)
        if known.bank != UNPLACED:
            self._touch(known.bank)
            return Placement(known.bank)
        before = self._bring(version, known)
        return Placement(known.bank, before)

    def pin(self, bank: int) -> None:
        """Count a resident sample that uses the slot."""
        slot = self._slot(bank)
        if slot.users == 0:
            slot.in_use_since = self._tick()
        slot.users += 1

    def unpin(self, bank: int) -> None:
        """Discount a sample: the last command that uses the slot for it has been sent."""
        self._slot(bank).users -= 1

    def unpin_all(self) -> None:
        """Discount all samples."""
        for slot in (self._base, *self._slots.values()):
            slot.users = 0

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
        if known.bank != UNPLACED:
            self._slots[known.bank].version = None
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

    def _may_use_another(self, bank: int) -> bool:
        if bank != UNPLACED and self._slot(bank).users:
            return True
        return len(self._used()) < (1 if self._is_of_models else len(self._slots) - 1)

    def _yield_one(self) -> None:
        candidates = self._used() - self._yielding
        if candidates:
            self._yielding.add(min(candidates, key=lambda bank: self._slot(bank).in_use_since))

    def _slot(self, bank: int) -> _Slot:
        return self._base if bank == BASE_BANK else self._slots[bank]

    def _used(self) -> set[int]:
        """Return the slots that rows use; that of the base model only where it is one of those to share."""
        slots = {**self._slots, BASE_BANK: self._base} if self._is_of_models else self._slots
        return {bank for bank, slot in slots.items() if slot.users}

    def _vacate(self) -> tuple[int, list[AnyCommand]]:
        """Empty the least recently used slot; return it with the commands that this takes."""
        bank = self._unused()[0]
        version = self._slots[bank].version
        if version is None:
            return bank, []
        known = self._versions[version]
        self._slots[bank].version = None
        if self._is_of_models and not known.requests:
            known.bank = UNPLACED
            if known.path is None:
                self.forget(version)
            return bank, []
        known.bank, known.is_paged = UNPLACED, True
        return bank, [Move(source=BankSlot(bank), target=Idle(self.weights(version)))]

    def _bring(self, version: VersionKey, known: _Version) -> list[AnyCommand]:
        """Move a version into a slot; return the commands that this takes."""
        path = known.path or ""
        assert path or known.is_paged, f"version {version} is neither with the workers nor on disk"
        bank, before = self._vacate()
        self._move_in(version, bank)
        if known.is_paged:
            known.is_paged = False
            source = Idle(self.weights(version))
        else:
            source = WeightsFolder(path)
        return [*before, Move(source=source, target=BankSlot(bank), adapter=known.adapter)]

    def _programs_to_vacate(self) -> list[ProgramShape]:
        version = self._slots[unused[0]].version if (unused := self._unused()) else None
        return [] if version is None else [PAGE_OUT]

    def _unused(self) -> list[int]:
        """Return the slots without users, least recently used first."""
        return sorted((bank for bank, slot in self._slots.items() if not slot.users), key=self._last_use)

    def _last_use(self, bank: int) -> tuple[bool, int]:
        return self._slots[bank].version is not None, self._slots[bank].used_at

    def _move_in(self, version: VersionKey, bank: int) -> None:
        self._slots[bank].version = version
        self._versions[version].bank = bank
        self._touch(bank)

    def _touch(self, bank: int) -> None:
        self._slots[bank].used_at = self._tick()

    def _tick(self) -> int:
        self._time += 1
        return self._time
