"""Sends the compile orders that ProgramOrders decides on, and collects their outcomes. Never waits."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from spmd_tx.coordinator.mesh.hub import Hub, is_blamed
from spmd_tx.coordinator.mesh.loss_causes import OUT_OF_MEMORY
from spmd_tx.coordinator.mesh.program_orders import ProgramOrder, ProgramOrders, ProgramRequest
from spmd_tx.coordinator.runtime.containment import contained
from spmd_tx.protocol.commands import ASIDE
from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.protocol.reports import Compiled


@dataclass(frozen=True)
class SettledProgram:
    """Holds the outcome of an order that all workers have answered."""

    program: ProgramShape
    error: str | None  # for the requests that wait for it
    costs: dict[str, float]  # seconds, by session that waited for it


class Compilation:
    """Drives the compile orders of one generation of workers."""

    def __init__(self, workers: Hub, orders: ProgramOrders) -> None:
        self.orders = orders
        self._workers = workers
        self._out: list[tuple[ProgramOrder, asyncio.Future[Compiled]]] = []
        self._awaited: Sequence[ProgramRequest] = ()

    @property
    def is_out(self) -> bool:
        """Whether anything is being compiled by the workers themselves."""
        return any(order.lane != ASIDE for order, _ in self._out)

    @property
    def waiting(self) -> set[str]:
        """The requests that wait for a program that is being compiled."""
        return self._waiting_for({order.program for order, _ in self._out})

    @property
    def blamed(self) -> set[str]:
        """The requests whose program may have lost the workers."""
        return self._waiting_for({order.program for order, answer in self._out if is_blamed(answer)})

    def settle(self) -> list[SettledProgram]:
        """Collect the outcomes of answered orders. Raises MeshError when the workers are lost."""
        done = [(order, answer.result()) for order, answer in self._out if answer.done()]
        if not done:
            return []
        self._out = [(order, answer) for order, answer in self._out if not answer.done()]
        settled = []
        for order, report in done:
            costs = self.orders.settled(order, report.seconds, report.error)
            self._workers.programs.compiled(order, report.seconds, report.error)
            error = None if report.error is None else _error_text(order.program, report.error)
            settled.append(SettledProgram(order.program, error, costs))
        self._workers.programs.show(self.orders.progress)
        return settled

    def advance(
        self, awaited: Sequence[ProgramRequest], on_answer: Callable[[], None], *, only_awaited: bool = False
    ) -> None:
        """Send the orders that are due: for ``awaited`` programs and, if allowed, ahead of need."""
        if not (awaited or self._awaited) and self.orders.is_complete:
            return
        self._awaited = awaited
        self.orders.update_awaited(awaited)
        while (order := self.orders.next_order(only_awaited)) is not None:
            ahead = contained(f"ordering {order.program} ahead of need")
            with nullcontext() if order.sessions else ahead:
                self._send(order, on_answer)

    def _send(self, order: ProgramOrder, on_answer: Callable[[], None]) -> None:
        is_last = not order.sessions and self.orders.is_complete
        how = {"is_last": is_last, "is_hurried": order.is_better}
        try:
            answer = self._workers.compile(order.program, lane=order.lane, **how)
        except BaseException:
            self.orders.take_back(order)
            raise
        answer.add_done_callback(lambda _: on_answer())
        self._out.append((order, answer))
        self._workers.programs.show(self.orders.progress)

    def _waiting_for(self, programs: set[ProgramShape]) -> set[str]:
        return {each.request_id for each in self._awaited if each.program in programs and each.request_id}


def _error_text(program: ProgramShape, error: str) -> str:
    remedy = f". {OUT_OF_MEMORY}" if "RESOURCE_EXHAUSTED" in error else ""
    return f"the server cannot compile the program of this request ({program}): {error}{remedy}"
