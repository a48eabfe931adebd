"""Has workers compile what ProgramOrders say, and tells what has become of it. It never waits."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from spmd_tx.coordinator.mesh.loss_causes import OUT_OF_MEMORY
from spmd_tx.coordinator.mesh.program_orders import Order, ProgramOrders, ProgramRequest
from spmd_tx.coordinator.mesh.warm_up_progress import CompileProgress
from spmd_tx.errors import WorkerLost
from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.protocol.reports import Compiled


class Compilers(Protocol):
    """All worker processes, as one."""

    programs: CompileProgress

    def compile(self, program: ProgramShape, *, lane: int, is_last: bool) -> asyncio.Future[Compiled]: ...


@dataclass(frozen=True)
class Settled:
    """An order that all workers have answered."""

    program: ProgramShape
    error: str | None  # for whoever waits for it
    costs: dict[str, float]  # of those who waited for it, by session


class Compilation:
    """The programs of one generation of workers."""

    def __init__(self, workers: Compilers, orders: ProgramOrders) -> None:
        self.orders = orders
        self._workers = workers
        self._out: list[tuple[Order, asyncio.Future[Compiled]]] = []
        self._wishes: Sequence[ProgramRequest] = ()

    @property
    def is_out(self) -> bool:
        """Whether anything is being compiled."""
        return bool(self._out)

    @property
    def waiting(self) -> set[str]:
        """The requests that wait for what is being compiled."""
        return self._wishers({order.program for order, _ in self._out})

    @property
    def blamed(self) -> set[str]:
        """The requests whose program may be why the workers are lost."""
        return self._wishers({order.program for order, answer in self._out if _is_blamed(answer)})

    def settle(self) -> list[Settled]:
        """Take in what is compiled. Raises MeshError when the workers are lost."""
        done = [(order, answer.result()) for order, answer in self._out if answer.done()]
        if not done:
            return []
        self._out = [(order, answer) for order, answer in self._out if not answer.done()]
        settled = []
        for order, report in done:
            costs = self.orders.settled(order, report.seconds, report.error)
            error = None if report.error is None else _in_words(order.program, report.error)
            settled.append(Settled(order.program, error, costs))
        self._workers.programs.show(self.orders.progress)
        return settled

    def advance(
        self, wishes: Sequence[ProgramRequest], on_answer: Callable[[], None], *, only_awaited: bool = False
    ) -> None:
        """Order what is to be compiled now, for those who wait or for nobody yet."""
        self._wishes = wishes
        self.orders.wish(wishes)
        while (order := self.orders.next_order(only_awaited)) is not None:
            is_last = not order.sessions and self.orders.is_complete
            answer = self._workers.compile(order.program, lane=order.lane, is_last=is_last)
            answer.add_done_callback(lambda _: on_answer())
            self._out.append((order, answer))
            self._workers.programs.show(self.orders.progress)

    def _wishers(self, programs: set[ProgramShape]) -> set[str]:
        return {wish.request_id for wish in self._wishes if wish.program in programs and wish.request_id}


def _in_words(program: ProgramShape, error: str) -> str:
    remedy = f". {OUT_OF_MEMORY}" if "RESOURCE_EXHAUSTED" in error else ""
    return f"the server cannot compile the program of this request ({program}): {error}{remedy}"


def _is_blamed(answer: asyncio.Future[Compiled]) -> bool:
    error = answer.exception() if answer.done() else None
    return isinstance(error, WorkerLost) and error.by_command
