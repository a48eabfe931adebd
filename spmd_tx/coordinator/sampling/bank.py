"""Which saved versions sit in the sampler bank on the device. No I/O: it only says what to send.

Bank slot 0 is the base model. Rows may use all other slots but one, so that a save always finds a place.
Versions that were never written to disk are written out before their slot is given to another one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from spmd_tx.coordinator.runtime.folder_names import folder_name
from spmd_tx.protocol.commands import AdapterSpec, AnyCommand, LoadSampler, PageOut
from spmd_tx.protocol.programs import ProgramShape

# One frozen set of weights to sample from: a sampler id for an ephemeral version, the checkpoint's
# tinker:// path for a named one, BASE_MODEL for the base model itself.
VersionKey = str
BASE_MODEL: VersionKey = "base"

BASE_BANK = 0
UNPLACED = -1

PAGE_OUT, LOAD_SAMPLER = ProgramShape(step="page_out"), ProgramShape(step="load_sampler")


@dataclass(frozen=True)
class Placement:
    """Where a version sits, and what must be sent, in this order, before the first command that uses it."""

    bank: int  # -1: every slot is in use, ask again later
    before: list[AnyCommand] = field(default_factory=list)


@dataclass
class _Version:
    adapter: AdapterSpec
    path: str | None  # PEFT folder; None: only on the device
    number: int  # no two weights of this bank have the same, whatever they are called
    bank: int = UNPLACED
    requests: int = 0  # that are sampled from it
    is_superseded: bool = False


@dataclass
class _Slot:
    version: VersionKey | None = None
    users: int = 0  # samples on the device that use it
    used_at: int = 0
    in_use_since: int = 0


class VersionBank:
    """The slots of the bank, the least recently used one given away first; slots that rows use stay."""

    def __init__(self, slots: int, page_out_dir: Path) -> None:
        assert slots >= 3, f"a bank of {slots} slots; the base model, a version in use and a save take 3"
        self._slots = {bank: _Slot() for bank in range(BASE_BANK + 1, slots)}
        self._versions: dict[VersionKey, _Version] = {}
        self._page_out_dir = page_out_dir
        self._abandoned: list[Path] = []
        self._yielding: set[int] = set()
        self._time = 0

    @property
    def size(self) -> int:
        """How many slots there are, that of the base model included."""
        return len(self._slots) + 1

    def register(self, version: VersionKey, adapter: AdapterSpec, path: str | None) -> None:
        """Make a version known; ``path`` is its PEFT folder, if it has one. A known one keeps its slot."""
        known = self._versions.setdefault(version, _Version(adapter, path, self._tick()))
        if path is not None:
            known.path = path

    def knows(self, version: VersionKey) -> bool:
        return version == BASE_MODEL or version in self._versions

    def weights(self, version: VersionKey) -> str:
        """What the version is now, unlike it before it was saved again."""
        return version if version == BASE_MODEL else f"{version}#{self._versions[version].number}"

    def reserve(self, version: VersionKey, adapter: AdapterSpec) -> Placement:
        """A slot for a version that SaveSampler is about to write; an earlier one of that name is gone."""
        self.forget(version)
        bank, before = self._vacate()
        self._versions[version] = _Version(adapter, None, self._tick())
        self._move_in(version, bank)
        return Placement(bank, before)

    def write_out(self, version: VersionKey) -> list[AnyCommand]:
        """What writes a version to disk, without giving its slot away, unless it is there already."""
        known = self._versions.get(version)
        if known is None or known.path is not None:
            return []
        return [self._page_out(version, known, known.bank)]

    def programs_to_reserve(self, version: VersionKey) -> list[ProgramShape]:
        """What the commands that come with ``reserve`` would need."""
        known = self._versions.get(version)
        leaves = None if known is None else self._slots.get(known.bank)
        return self._programs_to_vacate() if leaves is None or leaves.users else []

    def programs_to_write_out(self, versions: Iterable[VersionKey]) -> list[ProgramShape]:
        """What the commands of ``write_out`` would need."""
        known = [self._versions[version] for version in versions if version in self._versions]
        return [PAGE_OUT] if any(each.path is None for each in known) else []

    def programs_to_place(self, version: VersionKey) -> list[ProgramShape]:
        """What the commands that come with ``place`` would need, if it finds a slot."""
        if version == BASE_MODEL or self._versions[version].bank != UNPLACED:
            return []
        return [LOAD_SAMPLER, *self._programs_to_vacate()]

    def new_round(self) -> None:
        """Forget which slots were to take no more rows because of other versions that wait."""
        self._yielding.clear()

    def place(self, version: VersionKey) -> Placement:
        """Where new rows of a version may run, at once or after loading it.

        When all slots are in use the one that has been so for longest takes no new rows until the next
        round, so that versions that wait get it when its rows have ended.
        """
        if version == BASE_MODEL:
            return Placement(BASE_BANK)
        known = self._versions[version]
        if known.bank != UNPLACED and known.bank in self._yielding:
            return Placement(UNPLACED)
        if not self._may_use_another(known.bank):
            self._yield_one()
            return Placement(UNPLACED)
        if known.bank != UNPLACED:
            self._touch(known.bank)
            return Placement(known.bank)
        assert known.path is not None, f"version {version} is neither on the device nor on disk"
        bank, before = self._vacate()
        self._move_in(version, bank)
        return Placement(bank, [*before, LoadSampler(bank=bank, adapter=known.adapter, path=known.path)])

    def pin(self, bank: int) -> None:
        """A sample that uses the slot is on the device from now on."""
        if bank != BASE_BANK:
            slot = self._slots[bank]
            if slot.users == 0:
                slot.in_use_since = self._tick()
            slot.users += 1

    def unpin(self, bank: int) -> None:
        """The last command that uses the slot for this sample has been sent."""
        if bank != BASE_BANK:
            self._slots[bank].users -= 1

    def hold(self, version: VersionKey) -> None:
        """A request is sampled from this version until it lets go."""
        if version in self._versions:
            self._versions[version].requests += 1

    def let_go(self, version: VersionKey) -> None:
        """A request is not sampled from this version any more."""
        if version in self._versions:
            self._versions[version].requests -= 1
            self._forget_if_unused(version)

    def supersede(self, version: VersionKey) -> None:
        """Forget a version as soon as no request holds it: there will be no more of them."""
        if version in self._versions:
            self._versions[version].is_superseded = True
            self._forget_if_unused(version)

    def forget(self, version: VersionKey) -> None:
        """The version is not wanted any more. Samples that are on the device go on to their end."""
        known = self._versions.pop(version, None)
        if known is None:
            return
        if known.bank != UNPLACED:
            self._slots[known.bank].version = None
        if known.path is not None and Path(known.path).parent == self._page_out_dir:
            self._abandoned.append(Path(known.path))

    def take_abandoned(self) -> list[Path]:
        """Folders of forgotten versions; delete them when all commands sent so far have been carried out."""
        abandoned, self._abandoned = self._abandoned, []
        return abandoned

    def _forget_if_unused(self, version: VersionKey) -> None:
        known = self._versions[version]
        if known.is_superseded and not known.requests:
            self.forget(version)

    def _may_use_another(self, bank: int) -> bool:
        if bank != UNPLACED and self._slots[bank].users:
            return True
        return sum(slot.users > 0 for slot in self._slots.values()) < len(self._slots) - 1

    def _yield_one(self) -> None:
        candidates = {bank for bank, slot in self._slots.items() if slot.users} - self._yielding
        if candidates:
            self._yielding.add(min(candidates, key=lambda bank: self._slots[bank].in_use_since))

    def _vacate(self) -> tuple[int, list[AnyCommand]]:
        """Empty the slot that was unused for longest."""
        bank = self._unused()[0]
        version = self._slots[bank].version
        if version is None:
            return bank, []
        known = self._versions[version]
        known.bank = UNPLACED
        self._slots[bank].version = None
        if known.path is not None:
            return bank, []
        return bank, [self._page_out(version, known, bank)]

    def _programs_to_vacate(self) -> list[ProgramShape]:
        version = self._slots[unused[0]].version if (unused := self._unused()) else None
        return [PAGE_OUT] if version is not None and self._versions[version].path is None else []

    def _unused(self) -> list[int]:
        """The one that was so for longest comes first."""
        return sorted((bank for bank, slot in self._slots.items() if not slot.users), key=self._last_use)

    def _page_out(self, version: VersionKey, known: _Version, bank: int) -> PageOut:
        known.path = str(self._page_out_dir / folder_name(version))
        return PageOut(bank=bank, adapter=known.adapter, path=known.path)

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
