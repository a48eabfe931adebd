"""Training slots: assigns device slots to models and swaps adapters in and out. Makes commands, no I/O.

Commands are executed in the order in which they are sent, so a slot can be given away as soon as the last
command that needs it has been sent. The slot of an adapter does not affect its numbers.
"""

from collections.abc import Collection
from dataclasses import dataclass

from spmd_tx.coordinator.training.model import TrainedModel
from spmd_tx.protocol.commands import AnyCommand, Drop, Move
from spmd_tx.protocol.places import Idle, TrainSlot
from spmd_tx.protocol.programs import ProgramShape, program_of_move

# While others wait, a model with more work ready keeps its slot for this many tokens of training: much longer
# than a swap takes, and short enough to wait for.
TURN = 8192

SWAPS = SWAP_OUT, SWAP_IN = program_of_move(TrainSlot, Idle), program_of_move(Idle, TrainSlot)


@dataclass
class _Slot:
    model: TrainedModel | None = None
    used_at: int = 0
    left: int = 0  # tokens left of its turn


class TrainingSlots:
    """Assigns slots, least recently used first. An adapter with work ready stays to the end of its turn."""

    def __init__(self, count: int) -> None:
        self._slots = [_Slot() for _ in range(count)]
        self._swapped: set[str] = set()  # models whose state was kept when they left
        self._dropped: list[str] = []
        self._time = 0

    def seatable(
        self, models: Collection[TrainedModel], able: Collection[TrainedModel], *, at_once: bool
    ) -> list[TrainedModel]:
        """Return those of ``able`` whose next step may be sent; ``models`` are all that have steps."""
        is_place = self.has_place(at_once=at_once)
        return [each for each in able if is_place or each.has_slot or not each.unsent[0].needs_slot]

    def has_place(self, beside: Collection[TrainedModel] = (), *, at_once: bool = False) -> bool:
        """Return whether a model without a slot could get one now, but not from those ``beside`` it.

        ``at_once``: also from models whose turn is not over, if they have nothing to send at this moment.
        """
        return self._next_place(beside, at_once) is not None

    def programs(self, model: TrainedModel, beside: Collection[TrainedModel] = ()) -> list[ProgramShape]:
        """Return the programs that seating a model now would need."""
        place = None if model.has_slot else self._next_place(beside, at_once=True)
        if place is None:
            return []
        leaves = [] if self._slots[place].model is None else [SWAP_OUT]
        return leaves + ([SWAP_IN] if model.id in self._swapped else [])

    def seat(self, model: TrainedModel, beside: Collection[TrainedModel] = ()) -> list[AnyCommand]:
        """Give a model a slot, unless it has one; return commands to send first. There must be a place."""
        commands: list[AnyCommand] = []
        if not model.has_slot:
            place = self._next_place(beside, at_once=True)
            assert place is not None, f"there is no slot for {model.id}"
            slot = self._slots[place]
            if slot.model is not None:
                commands.append(Move(source=TrainSlot(place), target=Idle(slot.model.id)))
                self._swapped.add(slot.model.id)
                slot.model.vacate()
            if model.id in self._swapped:
                commands.append(Move(source=Idle(model.id), target=TrainSlot(place)))
                self._swapped.discard(model.id)
            self._slots[place] = _Slot(model, left=TURN)
            model.occupy(place)
        self._time += 1
        self._slots[model.slot].used_at = self._time
        return commands

    def used(self, model: TrainedModel, tokens: int) -> None:
        """Count tokens against the model's turn."""
        self._slots[model.slot].left -= tokens

    def free(self, model: TrainedModel) -> None:
        """Free the slot of a model that is no longer needed and whose commands have all been sent."""
        if model.has_slot:
            self._slots[model.slot] = _Slot()
            model.vacate()
        elif model.id in self._swapped:
            self._swapped.discard(model.id)
            self._dropped.append(model.id)

    def take_dropped(self) -> list[AnyCommand]:
        """Return the commands that make workers forget freed models that were swapped out."""
        dropped, self._dropped = self._dropped, []
        return [Drop(places=list(map(Idle, dropped)))] if dropped else []

    def obstacle(self, model: TrainedModel) -> str | None:
        """Say why the steps of a model with work ready are not sent; None: they may be."""
        if not model.unsent or model.has_slot or model.missing or self.has_place():
            return None
        return f"waiting for one of the {len(self._slots)} training slots, whose models have work ready"

    def _next_place(self, beside: Collection[TrainedModel], at_once: bool) -> int | None:
        """Return a free slot, else that of the model idle for longest, or of one whose turn is over."""
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


class OneModel(TrainingSlots):
    """Assigns the slot where all weights are trained: to one session at a time, until that has ended.

    Models of other sessions wait in the order in which they have asked for it; those of the same session take
    turns, as adapters do.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self._line: dict[TrainedModel, None] = {}  # those that wait

    def seatable(
        self, models: Collection[TrainedModel], able: Collection[TrainedModel], *, at_once: bool
    ) -> list[TrainedModel]:
        """Return the same; of the models that wait, the first one whose session may have the slot."""
        for model in models:
            if not model.has_slot and model.unsent[0].needs_slot:
                self._line.setdefault(model)
        able_to_wait = (each for each in self._line if self._owner in (None, each.session_id))
        first = next(able_to_wait, None) if self.has_place(at_once=at_once) else None
        return [each for each in able if each is first or each.has_slot or not each.unsent[0].needs_slot]

    def seat(self, model: TrainedModel, beside: Collection[TrainedModel] = ()) -> list[AnyCommand]:
        self._line.pop(model, None)
        return super().seat(model, beside)

    def free(self, model: TrainedModel) -> None:
        self._line.pop(model, None)
        super().free(model)

    def obstacle(self, model: TrainedModel) -> str | None:
        """Say why a model waits, and its place in the queue."""
        if model not in self._line:
            return None
        others = [each for each in self._line if each.session_id != self._owner]
        if model not in others:
            return "waiting for another model of its session, which has work ready"
        return (
            "this server trains all weights of one model at a time, and the session of another one has not "
            f"ended; place {others.index(model) + 1} in the queue"
        )

    @property
    def _owner(self) -> str | None:
        """The session that has the slot."""
        return model.session_id if (model := self._slots[0].model) is not None else None
