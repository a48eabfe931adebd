"""Which models' adapters are on the device, and what must be sent so that another one is. No I/O.

Commands are carried out in the order in which they are sent, so that a slot can be given away as soon as
the last command that needs it is on its way. Where an adapter is changes nothing about its numbers.
"""

from collections.abc import Collection
from dataclasses import dataclass

from spmd_tx.coordinator.training.model import TrainedModel
from spmd_tx.protocol.commands import AnyCommand, DropSwapped, SwapIn, SwapOut
from spmd_tx.protocol.programs import ProgramShape

# Who has more work ready keeps the slot for so long, in tokens of training, while others wait for it: much
# longer than a swap takes, and short enough to wait for.
TURN = 8192

SWAPS = SWAP_OUT, SWAP_IN = ProgramShape(step="swap_out"), ProgramShape(step="swap_in")


@dataclass
class _Slot:
    model: TrainedModel | None = None
    used_at: int = 0
    left: int = 0  # tokens of its turn


class TrainingSlots:
    """The least recently used adapter leaves first; but not before its turn, while it has work ready."""

    def __init__(self, count: int) -> None:
        self._slots = [_Slot() for _ in range(count)]
        self._swapped: set[str] = set()  # models whose state was kept when they left
        self._dropped: list[str] = []
        self._time = 0

    def has_place(self, beside: Collection[TrainedModel] = (), *, at_once: bool = False) -> bool:
        """Whether a model without a slot could have one now, without taking it from those ``beside`` it.

        ``at_once``: from those, too, whose turn is not over, but who have nothing to be sent at this moment.
        """
        return self._next_place(beside, at_once) is not None

    def programs(self, model: TrainedModel, beside: Collection[TrainedModel] = ()) -> list[ProgramShape]:
        """What it would take to seat a model now."""
        place = None if model.has_slot else self._next_place(beside, at_once=True)
        if place is None:
            return []
        leaves = [] if self._slots[place].model is None else [SWAP_OUT]
        return leaves + ([SWAP_IN] if model.id in self._swapped else [])

    def seat(self, model: TrainedModel, beside: Collection[TrainedModel] = ()) -> list[AnyCommand]:
        """Give a model a slot, if it has none, where there is a place; the result must be sent first."""
        commands: list[AnyCommand] = []
        if not model.has_slot:
            place = self._next_place(beside, at_once=True)
            assert place is not None, f"there is no slot for {model.id}"
            slot = self._slots[place]
            if slot.model is not None:
                commands.append(SwapOut(slot=place, model=slot.model.id))
                self._swapped.add(slot.model.id)
                slot.model.vacate()
            if model.id in self._swapped:
                commands.append(SwapIn(slot=place, model=model.id))
                self._swapped.discard(model.id)
            self._slots[place] = _Slot(model, left=TURN)
            model.occupy(place)
        self._time += 1
        self._slots[model.slot].used_at = self._time
        return commands

    def used(self, model: TrainedModel, tokens: int) -> None:
        """So much of the model's turn is over."""
        self._slots[model.slot].left -= tokens

    def free(self, model: TrainedModel) -> None:
        """The model is not wanted any more, and all of its commands have been sent."""
        if model.has_slot:
            self._slots[model.slot] = _Slot()
            model.vacate()
        elif model.id in self._swapped:
            self._swapped.discard(model.id)
            self._dropped.append(model.id)

    def take_dropped(self) -> list[AnyCommand]:
        """What tells the workers to forget those that were swapped out and are not wanted any more."""
        dropped, self._dropped = self._dropped, []
        return [DropSwapped(models=dropped)] if dropped else []

    def obstacle(self, model: TrainedModel) -> str | None:
        """Why nothing of a model that has work ready is sent; None: it may be sent."""
        if not model.unsent or model.has_slot or model.missing or self.has_place():
            return None
        return f"waiting for one of the {len(self._slots)} training slots, whose models have work ready"

    def _next_place(self, beside: Collection[TrainedModel], at_once: bool) -> int | None:
        """A free slot; else that of the model which was idle for longest, or has had its turn."""
        places = []
        for place, slot in enumerate(self._slots):
            model = slot.model
            if model is None:
                return place
            is_ready = bool(model.unsent) and not model.missing
            is_busy = not model.missing and (is_ready or model.has_more())
            if model not in beside and (not is_busy or slot.left <= 0 or (at_once and not is_ready)):
                places.append((is_ready, is_busy, slot.used_at, place))
        return min(places)[-1] if places else None
