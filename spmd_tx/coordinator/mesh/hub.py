"""The hub: sends every command, numbered, to all workers, and gathers their replies in order."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from spmd_tx.coordinator.mesh.warm_up_progress import CompileProgress
from spmd_tx.coordinator.runtime.futures import fail
from spmd_tx.coordinator.runtime.mesh_record import MeshTimeline
from spmd_tx.errors import CommandGap, WorkerLost
from spmd_tx.protocol.addresses import joined
from spmd_tx.protocol.commands import ASIDE, AnyCommand, Compile
from spmd_tx.protocol.encoding import encode
from spmd_tx.protocol.envelope import Envelope
from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.protocol.reports import (
    PROTOCOL_VERSION,
    AnyReport,
    Beat,
    Compiled,
    CustomLossEnd,
    CustomLossNews,
    Hello,
    Progress,
    Ready,
    Reply,
    Written,
)
from spmd_tx.protocol.setup import Setup

logger = logging.getLogger(__name__)

COMPILE = str(Compile.__struct_config__.tag)
NO_COMMAND = -1  # as the number of a culprit: it was no command

Send = Callable[[bytes, bytes], bool]  # identity and message; False when the connection is gone


@dataclass
class _Worker:
    """Holds what is known of one worker of this generation."""

    identity: bytes
    jax_port: int
    ready: Ready | None = None
    replies: int = 0  # so far; also the number of the next one


@dataclass
class _Order:
    """Follows one program that is being compiled."""

    program: ProgramShape
    lane: int
    reply: asyncio.Future[Reply]  # done when all workers know of the order
    missing: int  # workers that have not reported the outcome
    answer: asyncio.Future[Compiled]
    worst: Compiled | None = None  # the slowest outcome, or one that failed


@dataclass
class _Sent:
    """Follows one command that not all workers have answered."""

    name: str
    answer: asyncio.Future[Reply]
    missing: int  # workers that have not replied
    reply: Reply | None = field(default=None)  # of process 0
    refusals: set[str | None] = field(default_factory=set[str | None])  # one, if all workers say the same


@dataclass(eq=False)
class Hub:
    """Addresses all workers as one, for the coordinator's life; between generations there are none."""

    transmit: Send
    on_written: Callable[[Written], None]  # hears that a folder written aside is complete, or never will be
    on_custom_loss: Callable[[CustomLossNews | CustomLossEnd], None]
    # Returns the traceparents of requests, which workers' spans belong to
    contexts_of: Callable[[Iterable[str]], tuple[str, ...]] = lambda requests: ()
    loss: WorkerLost | None = None  # of the last generation; None once the next one is ready
    record: MeshTimeline = field(default_factory=MeshTimeline)
    avoided: set[ProgramShape] = field(default_factory=set)  # their compilation may have ended a generation

    def __post_init__(self) -> None:
        self.compiles_aside, self.compile_threads, self.kernels = False, 1, ""  # as Ready says
        self.programs = CompileProgress(self.record)
        self._begin(None)

    def _begin(self, setup: Setup | None) -> None:
        """Begin with nothing sent. Without a setup there are no workers."""
        self._setup = setup
        self._all_ready: asyncio.Future[Ready] | None = None
        if setup is not None:
            self._all_ready = asyncio.get_running_loop().create_future()
        self.answered = 0  # commands that all workers of this generation have executed
        self.was_useful = False  # whether any of them was more than an order to compile
        self._workers: dict[int, _Worker] = {}
        self._sent: deque[_Sent] = deque()  # oldest first
        self._orders: dict[int, _Order] = {}  # by number
        self._ordered = 0  # so far; also the last one's number

    def begin(self, setup: Setup) -> None:
        """Expect the workers of a generation. ``jax_coordinator`` has only the host yet."""
        self._begin(setup)
        self.programs.begin()

    def send(self, command: AnyCommand, requests: Iterable[str] = ()) -> asyncio.Future[Reply]:
        """Send to all workers. The future is done when all have replied; WorkerLost when there are none.

        ``requests`` are those that it is for.
        """
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if self._setup is None:
            fail(answer, self._absence)
            return answer
        sequence, generation = self.answered + len(self._sent), self._setup.generation
        envelope = encode(
            Envelope(
                generation=generation,
                sequence=sequence,
                command=command,
                contexts=self.contexts_of(requests),
            )
        )
        self._sent.append(_Sent(command.name, answer, missing=self._setup.num_processes))
        for worker in self._workers.values():
            self.transmit(worker.identity, envelope)  # a lost connection is noticed elsewhere
        return answer

    def compile(
        self, program: ProgramShape, *, lane: int, is_last: bool = False, is_hurried: bool = False
    ) -> asyncio.Future[Compiled]:
        """Have all workers compile a program. The future is done when all have reported the outcome."""
        answer: asyncio.Future[Compiled] = asyncio.get_running_loop().create_future()
        if self._setup is None:
            fail(answer, self._absence)
            return answer
        self._ordered += 1
        command = Compile(
            number=self._ordered, program=program, lane=lane, is_last=is_last, is_hurried=is_hurried
        )
        order = _Order(program, lane, self.send(command), self._setup.num_processes, answer)
        self._orders[self._ordered] = order
        return answer

    @property
    def _absence(self) -> WorkerLost:
        """Why there are no workers. A command that was sent to nobody is not the cause."""
        return WorkerLost(str(self.loss or "the workers have not started"))

    async def all_ready(self) -> Ready:
        """Wait until all workers are ready. The result is the report of process 0."""
        assert self._all_ready is not None
        ready = await asyncio.shield(self._all_ready)
        self.loss = None
        logger.info("workers: running")
        self.compiles_aside, self.compile_threads = ready.compiles_aside, ready.compile_threads
        self.kernels = ready.kernels
        self.record.ready(ready.device, ready.plan)
        return ready

    def take(self, identity: bytes, report: AnyReport) -> None:
        """Process a worker's report. Raises MeshError when it breaks the protocol."""
        if not self.includes(report):
            if not isinstance(report, Beat):
                logger.warning("ignored a %s of %s", type(report).__name__, _origin(report))
            return
        if isinstance(report, Progress) and report.process == 0:
            self.be_busy(report.message)
            logger.info("workers: %s", report.message or "running")
        match report:
            case Written():  # as the next two, sent while a command is being executed
                return self.on_written(report)
            case CustomLossNews() | CustomLossEnd():
                return self.on_custom_loss(report)
            case Compiled():
                return self._take_compiled(report)
            case Hello():
                return self._welcome(identity, report)
            case Beat():  # comes over a connection of its own
                return None if report.programs is None else self.programs.take(report.programs)
            case _:
                worker = self._workers.get(report.process)
        if worker is None or worker.identity != identity:
            logger.warning("ignored a %s of a stranger as %s", type(report).__name__, _origin(report))
        elif isinstance(report, Ready):
            self._note_ready(worker, report)
        elif isinstance(report, Reply):
            self._take_reply(worker, report)

    def _note_ready(self, worker: _Worker, ready: Ready) -> None:
        worker.ready = ready
        assert self._all_ready is not None
        if self._absent():
            self.be_busy("waiting for worker " + ", ".join(map(str, self._absent())))
        elif not self._all_ready.done():
            leader = self._workers[0].ready
            assert leader is not None
            self._all_ready.set_result(leader)

    @property
    def busy(self) -> str | None:
        """What the workers do instead of running commands."""
        return self.record.busy

    def be_busy(self, what: str) -> None:
        """Set what the workers do, in words; after a loss, the reason is added."""
        why = f"restarting the workers: {self.loss}" if self.loss else None
        self.record.busy = "; ".join(filter(None, (why, what))) or None

    def lose(
        self, loss: WorkerLost, culprit: int | None = None, orders: Collection[int] | None = None
    ) -> None:
        """End the generation: every command without a reply is lost, and so are compile orders.

        If the ``culprit`` or the ``orders`` are known, only that command, or one of those orders, may be the
        cause.
        """
        self.loss = loss
        self.record.lost(str(loss))
        self.be_busy("")
        for number, order in self._orders.items():
            may_be = loss.by_command and (orders is None or number in orders)
            fail(order.answer, WorkerLost(str(loss), may_be))
            self.avoided |= {order.program} if may_be else set()
        for number, sent in enumerate(self._sent, start=self.answered):
            fail(sent.answer, WorkerLost(str(loss), loss.by_command and culprit in (None, number)))
        if self._all_ready is not None:
            fail(self._all_ready, loss)
        self._begin(None)

    def includes(self, report: AnyReport) -> bool:
        """Whether the sender of a report belongs to this generation."""
        setup = self._setup
        return (
            setup is not None
            and report.generation == setup.generation
            and 0 <= report.process < setup.num_processes
        )

    def late(self) -> list[int]:
        """The workers that have not executed the oldest command."""
        return [number for number, worker in self._workers.items() if worker.replies <= self.answered]

    def current(self, worker: int | None = None) -> int | None:
        """The number of the command that a worker, or the slowest, executes; None: no command."""
        known = self._workers.get(worker) if worker is not None else None
        number = self.answered if known is None else known.replies
        return number if number < self.answered + len(self._sent) else None

    def name_of(self, sequence: int) -> str:
        """The name of a command that not all workers have executed."""
        place = sequence - self.answered
        return self._sent[place].name if 0 <= place < len(self._sent) else "done"

    def compiling(self) -> dict[int, str]:
        """The programs of orders that all workers know of and not all have settled, by number.

        What is compiled aside is left out: it may take as long as others need the processor.
        """
        return {
            number: str(order.program)
            for number, order in self._orders.items()
            if order.reply.done() and order.lane != ASIDE
        }

    def _take_compiled(self, report: Compiled) -> None:
        order = self._orders.get(report.number)
        if order is None:
            return
        known = filter(None, (order.worst, report))
        order.worst = max(known, key=lambda each: (each.error is not None, each.seconds))
        order.missing -= 1
        if not order.missing:
            del self._orders[report.number]
            if not order.answer.done():
                order.answer.set_result(order.worst)

    def _absent(self) -> list[int]:
        """The workers that are not ready."""
        assert self._setup is not None
        ready = {number for number, worker in self._workers.items() if worker.ready is not None}
        return [number for number in range(self._setup.num_processes) if number not in ready]

    def _welcome(self, identity: bytes, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise WorkerLost(
                f"worker {hello.process} speaks protocol {hello.version} and this server {PROTOCOL_VERSION}; "
                "install the same version of spmd_tx on all hosts"
            )
        if hello.process in self._workers:
            logger.warning("ignored a second worker %d", hello.process)
            return
        self._workers[hello.process] = _Worker(identity, hello.jax_port)
        leader = self._workers.get(0)
        if leader is None:
            return  # its address is part of the others' setup
        assert self._setup is not None
        address = joined(self._setup.jax_coordinator, self._setup.jax_port or leader.jax_port)
        setup = encode(msgspec.structs.replace(self._setup, jax_coordinator=address))
        waiting = self._workers.values() if hello.process == 0 else [self._workers[hello.process]]
        for worker in waiting:
            self.transmit(worker.identity, setup)

    def _take_reply(self, worker: _Worker, reply: Reply) -> None:
        if reply.sequence != worker.replies or reply.sequence >= self.answered + len(self._sent):
            raise CommandGap(
                f"worker {reply.process}: expected the reply to command {worker.replies}, "
                f"received {reply.sequence}"
            )
        worker.replies += 1
        sent = self._sent[reply.sequence - self.answered]
        sent.missing -= 1
        sent.refusals.add(reply.refusal)
        if reply.process == 0:
            sent.reply = reply
        if len(sent.refusals) > 1:
            raise WorkerLost(
                f"only some workers refused {sent.name}: {next(filter(None, sent.refusals))}; all hosts must "
                "see the same files"
            )
        while self._sent and not self._sent[0].missing:
            first = self._sent.popleft()
            self.answered += 1
            self.was_useful |= first.name != COMPILE
            if not first.answer.done():
                assert first.reply is not None
                first.answer.set_result(first.reply)


def _origin(report: AnyReport) -> str:
    return f"worker {report.process}, generation {report.generation}"


def is_blamed(answer: asyncio.Future[Any]) -> bool:
    """Whether what was sent may have lost the workers."""
    error = answer.exception() if answer.done() else None
    return isinstance(error, WorkerLost) and error.by_command
