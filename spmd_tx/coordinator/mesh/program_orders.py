"""In which order workers compile programs. Pure.

First comes what somebody waits for, then what would be better than what is used, then the menu. Sessions
take turns, and are charged for the seconds that their programs take.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spmd_tx.coordinator.runtime.fair_shares import FairShares
from spmd_tx.protocol.commands import COMPILE_LANES
from spmd_tx.protocol.programs import ProgramShape

AWAITED, AHEAD = range(COMPILE_LANES)

COST_OF_A_SECOND = 4096  # in tokens of training: about what devices train while a program is compiled


@dataclass(frozen=True)
class ProgramRequest:
    """Somebody waits for a program."""

    program: ProgramShape
    session: str
    request_id: str = ""  # "" for what the server does by itself


@dataclass(frozen=True)
class Order:
    """A program that workers are told to compile."""

    program: ProgramShape
    lane: int
    sessions: frozenset[str] = frozenset()  # that wait for it; nobody: it is compiled ahead


@dataclass(frozen=True)
class Progress:
    """How far the menu is, and what is being compiled."""

    ready: int
    planned: int
    compiling: tuple[str, ...] = ()


class ProgramOrders:
    """Which programs are ready on all workers of a generation, and which one is to be compiled next.

    At most one is out in each of two lanes. The first is for what somebody waits for. The other one is for
    what is compiled ahead of need, and for those who would else wait for the program of another session.
    """

    def __init__(self, menu: Iterable[ProgramShape]) -> None:
        self._menu = dict.fromkeys(menu)
        self._to_come = list(reversed(self._menu))
        self._better: dict[ProgramShape, None] = {}  # than what is used for want of them, oldest first
        self._ready: dict[str, dict[ProgramShape, None]] = {}  # by step
        self._failed: set[ProgramShape] = set()
        self._out: list[Order] = []
        self._wishes: list[ProgramShape] = []  # that are not ordered, in the order of their turns
        self._wishers: dict[ProgramShape, frozenset[str]] = {}  # sessions
        self._shares = FairShares()

    def is_ready(self, program: ProgramShape) -> bool:
        return program in self._ready.get(program.step, ())

    def ready(self, step: str) -> Iterable[ProgramShape]:
        """All programs of a step that are ready."""
        return self._ready.get(step, ())

    def has_failed(self, program: ProgramShape) -> bool:
        """Whether it could not be compiled when it was last tried."""
        return program in self._failed

    def prefer(self, program: ProgramShape) -> None:
        """A command uses a larger program than this one, or fewer rows than there are for want of it."""
        if not self.is_ready(program) and program not in self._failed:
            self._better[program] = None

    def wish(self, wishes: Sequence[ProgramRequest]) -> None:
        """All that is waited for now: sessions take turns, and each has its first wishes first."""
        by_session: dict[str, list[ProgramShape]] = {}
        for wish in wishes:
            if not self.is_ready(wish.program):
                by_session.setdefault(wish.session, []).append(wish.program)
        queues = [by_session[session] for session in self._shares.ranking(list(by_session))]
        out = {order.program for order in self._out}
        turns = max(map(len, queues), default=0)
        in_turns = [queue[turn] for turn in range(turns) for queue in queues if turn < len(queue)]
        self._wishes = [program for program in dict.fromkeys(in_turns) if program not in out]
        self._wishers = {
            program: frozenset(session for session, wanted in by_session.items() if program in wanted)
            for program in self._wishes
        }

    def next_order(self, only_awaited: bool = False) -> Order | None:
        """What is to be ordered now, if anything; it is out from then on, until it is settled."""
        busy = {order.lane for order in self._out}
        order = None
        if self._wishes and (AWAITED not in busy or (AHEAD not in busy and not only_awaited)):
            order = self._next_wished(AWAITED if AWAITED not in busy else AHEAD)
        elif not self._wishes and not busy and not only_awaited:
            program = self._next_ahead()
            order = Order(program, AHEAD) if program is not None else None
        if order is not None:
            self._out.append(order)
        return order

    def _next_wished(self, lane: int) -> Order | None:
        served = frozenset[str]().union(*(order.sessions for order in self._out))
        for place, program in enumerate(self._wishes):
            sessions = self._wishers[program]
            if lane == AWAITED or not sessions & served:
                del self._wishes[place]
                return Order(program, lane, sessions)
        return None

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to be ordered ahead of need."""
        return not self._to_come and not self._better

    def settled(self, order: Order, seconds: float, error: str | None) -> dict[str, float]:
        """All workers have answered an order. What that costs those who waited for it, in tokens."""
        self._out.remove(order)
        self._better.pop(order.program, None)
        if error is None:
            self._failed.discard(order.program)
            self._ready.setdefault(order.program.step, {})[order.program] = None
        else:
            self._failed.add(order.program)
        costs = {session: seconds * COST_OF_A_SECOND / len(order.sessions) for session in order.sessions}
        self._shares.charge(costs)
        return costs

    def reason(self, program: ProgramShape) -> str:
        """Why somebody waits who waits for this one."""
        out = [order.program for order in self._out]
        if program in out:
            return f"waiting for its program: compiling {program}"
        before = sum(bool(order.sessions) for order in self._out)
        before += self._wishes.index(program) if program in self._wishes else 0
        others = f"{before} {'other' if before == 1 else 'others'} before it"
        return f"waiting for its program: compiling {program}" + (f" ({others})" if before else "")

    @property
    def progress(self) -> Progress:
        ready = sum(self.is_ready(program) for program in self._menu)
        return Progress(ready, len(self._menu), tuple(str(order.program) for order in self._out))

    def _next_ahead(self) -> ProgramShape | None:
        for program in list(self._better):
            del self._better[program]
            if not self.is_ready(program):
                return program
        while self._to_come:
            program = self._to_come.pop()
            if not self.is_ready(program) and program not in self._failed:
                return program
        return None
