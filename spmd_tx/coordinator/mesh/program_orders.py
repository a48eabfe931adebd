"""Decides in which order workers compile programs. Pure.

First come programs that requests wait for, then programs that would be better than those in use, then the
warm-up menu: what was used before the start, what is near to what is used now, and the rest. Sessions take
turns, and are charged for the seconds that their programs take.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spmd_tx.coordinator.mesh.program_uses import ProgramUses
from spmd_tx.coordinator.runtime.fair_shares import FairShares
from spmd_tx.coordinator.runtime.mesh_record import MenuProgress
from spmd_tx.protocol.commands import AHEAD, ASIDE, AWAITED, HELPING
from spmd_tx.protocol.programs import ProgramShape


@dataclass(frozen=True)
class ProgramRequest:
    """Says that a session waits for a program."""

    program: ProgramShape
    session: str
    request_id: str = ""  # "" for the server's own work


@dataclass(frozen=True)
class ProgramOrder:
    """Tells workers to compile a program."""

    program: ProgramShape
    lane: int
    sessions: frozenset[str] = frozenset()  # that wait for it; empty: it is compiled ahead of need
    is_better: bool = False  # than one that commands use in its place


class ProgramOrders:
    """Knows which programs are ready on all workers of a generation, and decides which is compiled next.

    Each lane compiles at most one program at a time. The first is for awaited programs. The second is for
    sessions that would otherwise wait for another session's program. Programs ahead of need have the third
    one if workers compile ``aside``, at nobody's expense; otherwise they have the second, and with several
    ``threads`` those that help it, while nobody waits.
    """

    def __init__(
        self,
        menu: Iterable[ProgramShape],
        *,
        aside: bool = False,
        threads: int = 1,
        uses: ProgramUses | None = None,
    ) -> None:
        self._of_menu = (ASIDE,) if aside else (AHEAD, *HELPING)[: max(1, threads)]
        self._uses = uses or ProgramUses()
        self._menu = dict.fromkeys(self._uses.in_order(menu))
        self._to_come = dict(self._menu)
        self._better: dict[ProgramShape, None] = {}  # than those used in their place; oldest first
        self._ready: dict[str, dict[ProgramShape, None]] = {}  # by step
        self._failed: set[ProgramShape] = set()
        self._out: list[ProgramOrder] = []
        self._awaited: list[ProgramShape] = []  # and not ordered yet, in the order of their turns
        self._sessions: dict[ProgramShape, frozenset[str]] = {}  # that wait for a program
        self._shares = FairShares()

    def is_ready(self, program: ProgramShape) -> bool:
        return program in self._ready.get(program.step, ())

    def ready(self, step: str) -> Iterable[ProgramShape]:
        """All programs of a step that are ready."""
        return self._ready.get(step, ())

    def has_failed(self, program: ProgramShape) -> bool:
        """Whether the last attempt to compile it failed."""
        return program in self._failed

    def note_use(self, program: ProgramShape) -> None:
        """Note that a command needs this program, for the order of those to come, and of the next start."""
        self._uses.note(program)

    def prefer(self, program: ProgramShape) -> None:
        """Compile this program ahead of the menu: a command has used a worse one in its place."""
        if not self.is_ready(program) and program not in self._failed:
            self._better[program] = None

    def update_awaited(self, requests: Sequence[ProgramRequest]) -> None:
        """Set what is waited for now. Sessions take turns, each with its programs in their order."""
        by_session: dict[str, list[ProgramShape]] = {}
        for request in requests:
            if not self.is_ready(request.program):
                by_session.setdefault(request.session, []).append(request.program)
        queues = [by_session[session] for session in self._shares.ranking(list(by_session))]
        out = {order.program for order in self._out if order.lane != ASIDE}
        turns = max(map(len, queues), default=0)
        in_turns = [queue[turn] for turn in range(turns) for queue in queues if turn < len(queue)]
        self._awaited = [program for program in dict.fromkeys(in_turns) if program not in out]
        self._sessions = {
            program: frozenset(session for session, wanted in by_session.items() if program in wanted)
            for program in self._awaited
        }

    def next_order(self, only_awaited: bool = False) -> ProgramOrder | None:
        """The next order, if one is due; it counts as sent until it is settled."""
        busy = {order.lane for order in self._out}
        order = None
        if self._awaited and (AWAITED not in busy or (AHEAD not in busy and not only_awaited)):
            order = self._next_awaited(AWAITED if AWAITED not in busy else AHEAD)
        lane = None if only_awaited else self._free_lane(busy)
        if order is None and lane is not None:
            order = self._next_ahead(lane)
        if order is not None:
            self._out.append(order)
        return order

    def take_back(self, order: ProgramOrder) -> None:
        """Note that an order could not be sent."""
        self._out.remove(order)

    def _free_lane(self, busy: set[int]) -> int | None:
        """Return the lane in which a program ahead of need may be compiled now."""
        if ASIDE not in self._of_menu and (self._awaited or AWAITED in busy):
            return None
        return next((lane for lane in self._of_menu if lane not in busy), None)

    def _next_awaited(self, lane: int) -> ProgramOrder | None:
        served = frozenset[str]().union(*(order.sessions for order in self._out))
        for place, program in enumerate(self._awaited):
            sessions = self._sessions[program]
            if lane == AWAITED or not sessions & served:
                del self._awaited[place]
                return ProgramOrder(program, lane, sessions)
        return None

    @property
    def is_complete(self) -> bool:
        """Whether no program is left to be compiled ahead of need."""
        return not self._to_come and not self._better

    def settled(self, order: ProgramOrder, seconds: float, error: str | None) -> dict[str, float]:
        """Note that all workers have answered an order. The result is its cost in seconds, by session."""
        self._out.remove(order)
        self._better.pop(order.program, None)
        if error is None:
            self._failed.discard(order.program)
            self._ready.setdefault(order.program.step, {})[order.program] = None
        elif not self.is_ready(order.program):
            self._failed.add(order.program)
        costs = {session: seconds / len(order.sessions) for session in order.sessions}
        self._shares.charge(costs)
        return costs

    def reason(self, program: ProgramShape) -> str:
        """Why a request that waits for this program waits, in words for clients."""
        out = [order.program for order in self._out]
        if program in out:
            return f"waiting for its program: compiling {program}"
        before = sum(bool(order.sessions) for order in self._out)
        before += self._awaited.index(program) if program in self._awaited else 0
        others = f"{before} {'other' if before == 1 else 'others'} before it"
        return f"waiting for its program: compiling {program}" + (f" ({others})" if before else "")

    @property
    def progress(self) -> MenuProgress:
        ready = sum(self.is_ready(program) for program in self._menu)
        return MenuProgress(ready, len(self._menu), tuple(str(order.program) for order in self._out))

    def _next_ahead(self, lane: int) -> ProgramOrder | None:
        taken = {order.program for order in self._out}
        for program in list(self._better):
            del self._better[program]
            if not self.is_ready(program) and program not in taken:
                return ProgramOrder(program, lane, is_better=True)
        while self._to_come:
            program = self._uses.next_of(list(self._to_come))
            del self._to_come[program]
            if not self.is_ready(program) and program not in self._failed and program not in taken:
                return ProgramOrder(program, lane)
        return None
