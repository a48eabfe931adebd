"""Training slots: assigns device slots to models and swaps adapters in and out. Makes commands, no I/O.

Commands are executed in the order in which they are sent, so a slot can be given away as soon as the last
command that needs it has been sent. The slot of an adapter does not affect its numbers.
"""

from collections.abc import Collection

from spmd_tx.coordinator.runtime.slot_pool import SlotPool
from spmd_tx.coordinator.training.model import TrainedModel
from spmd_tx.protocol.commands import AnyCommand, Drop, Move
from spmd_tx.protocol.places import Idle, TrainSlot
from spmd_tx.protocol.programs import ProgramShape, program_of_move

# While others wait, a model with more work ready keeps its slot for this many tokens of training: much longer
# than a swap takes, and short enough to wait for.
TURN = 8192

SWAPS = SWAP_OUT, SWAP_IN = program_of_move(TrainSlot, Idle), program_of_move(Idle, TrainSlot)


class TrainingSlots:
    """Assigns slots, least recently used first. A model with work ready stays to the end of its turn."""

    def __init__(self, count: int, *, until_session_ends: bool = False) -> None:
        """``until_session_ends``: a session keeps the slot of its models until it has ended.

        Models of other sessions then wait in the order in which they have asked for it; those of the same
        session take turns.
        """
        self._pool = SlotPool[TrainedModel](count)
        self._until_session_ends = until_session_ends
        self._waiting: dict[TrainedModel, None] = {}  # those without a slot, in the order of asking
        self._swapped: set[str] = set()  # models whose state was kept when they left
        self._dropped: list[str] = []

    def seatable(
        self, models: Collection[TrainedModel], able: Collection[TrainedModel], *, at_once: bool
    ) -> list[TrainedModel]:
        """Return those of ``able`` whose next step may be sent; ``models`` are all that have steps."""
        for model in models:
            if not model.has_slot and model.unsent[0].needs_slot:
                self._waiting.setdefault(model)
        seated = self._first_in_line() if self.has_place(at_once=at_once) else ()
        return [each for each in able if each in seated or each.has_slot or not each.unsent[0].needs_slot]

    def has_place(self, beside: Collection[TrainedModel] = (), *, at_once: bool = False) -> bool:
        """Return whether a model without a slot could get one now, but not from those ``beside`` it.

        ``at_once``: also from models whose turn is not over, if they have nothing to send at this moment.
        """
        return self._next_slot(beside, at_once) is not None

    def programs(self, model: TrainedModel, beside: Collection[TrainedModel] = ()) -> list[ProgramShape]:
        """Return the programs that seating a model now would need."""
        slot = None if model.has_slot else self._next_slot(beside, at_once=True)
        if slot is None:
            return []
        leaves = [] if self._pool.content_of(slot) is None else [SWAP_OUT]
        return leaves + ([SWAP_IN] if model.id in self._swapped else [])

    def seat(self, model: TrainedModel, beside: Collection[TrainedModel] = ()) -> list[AnyCommand]:
        """Give a model a slot, unless it has one; return commands to send first. There must be a place."""
        self._waiting.pop(model, None)
        if model.has_slot:
            self._pool.touch(model.slot)
            return []
        commands: list[AnyCommand] = []
        slot = self._next_slot(beside, at_once=True)
        assert slot is not None, f"there is no slot for {model.id}"
        leaves = self._pool.content_of(slot)
        if leaves is not None:
            commands.append(Move(source=TrainSlot(slot), target=Idle(leaves.id)))
            self._swapped.add(leaves.id)
            self._vacate(leaves)
        if model.id in self._swapped:
            commands.append(Move(source=Idle(model.id), target=TrainSlot(slot)))
            self._swapped.discard(model.id)
        self._pool.put(model, slot, turn=TURN)
        model.seat = slot
        return commands

    def used(self, model: TrainedModel, tokens: int) -> None:
        """Count tokens against the model's turn."""
        self._pool.spend(model.slot, tokens)

    def free(self, model: TrainedModel) -> None:
        """Free the slot of a model that is no longer needed and whose commands have all been sent."""
        self._waiting.pop(model, None)
        if model.has_slot:
            self._vacate(model)
        elif model.id in self._swapped:
            self._swapped.discard(model.id)
            self._dropped.append(model.id)

    def take_dropped(self) -> list[AnyCommand]:
        """Return the commands that make workers forget freed models that were swapped out."""
        dropped, self._dropped = self._dropped, []
        return [Drop(places=list(map(Idle, dropped)))] if dropped else []

    def obstacle(self, model: TrainedModel) -> str | None:
        """Say why the steps of a model with work ready are not sent; None: they may be."""
        if self._until_session_ends:
            return self._place_in_line(model)
        if not model.unsent or model.has_slot or model.missing or self.has_place():
            return None
        return f"waiting for one of the {len(self._pool)} training slots, whose models have work ready"

    def _place_in_line(self, model: TrainedModel) -> str | None:
        if model not in self._waiting:
            return None
        others = [each for each in self._waiting if each.session_id not in self._sessions()]
        if model not in others:
            return "waiting for another model of its session, which has work ready"
        return (
            "this server trains all weights of one model at a time, and the session of another one has not "
            f"ended; place {others.index(model) + 1} in the queue"
        )

    def _first_in_line(self) -> Collection[TrainedModel]:
        """Return those of the models that wait that may get a slot next."""
        if not self._until_session_ends:
            return self._waiting
        sessions = self._sessions()
        return [each for each in self._waiting if not sessions or each.session_id in sessions][:1]

    def _sessions(self) -> set[str]:
        """Return the sessions whose models have slots."""
        return {model.session_id for model in self._pool.contents()}

    def _vacate(self, model: TrainedModel) -> None:
        self._pool.remove(model)
        model.seat = None

    def _next_slot(self, beside: Collection[TrainedModel], at_once: bool) -> int | None:
        """Return a free slot, else that of the model idle for longest, or of one whose turn is over."""

        def claim(model: TrainedModel) -> tuple[bool, bool] | None:
            is_ready = bool(model.unsent) and not model.missing
            is_busy = not model.missing and (is_ready or model.has_more())
            stays = is_busy and self._pool.has_turn(model.slot) and (is_ready or not at_once)
            return None if stays or model in beside else (is_ready, is_busy)

        return self._pool.next_slot(claim)
