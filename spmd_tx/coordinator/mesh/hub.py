"""The hub: sends every command, numbered, to all workers, and gathers their replies in order."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from spmd_tx.coordinator.mesh.warm_up_progress import CompileProgress
from spmd_tx.coordinator.runtime.mesh_record import MeshTimeline
from spmd_tx.errors import CommandGap, MeshError, WorkerLost
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


class Hub:
    """Addresses all workers as one, for the coordinator's life; between generations there are none."""

    def __init__(
        self,
        send: Send,
        on_written: Callable[[Written], None],
        on_custom_loss: Callable[[CustomLossNews | CustomLossEnd], None],
        contexts_of: Callable[[Iterable[str]], tuple[str, ...]] = lambda requests: (),
    ) -> None:
        """``on_written`` hears that a folder written aside is complete, or that it never will be.

        ``contexts_of`` returns the traceparents of requests, which workers' spans belong to.
        """
        self.loss: WorkerLost | None = None  # of the last generation; None once the next one is ready
        self.compiles_aside, self.compile_threads, self.kernels = False, 1, ""  # as Ready says
        self.record = MeshTimeline()
        self.programs = CompileProgress(self.record)
        self.avoided: set[ProgramShape] = set()  # programs whose compilation may have ended a generation
        self._send = send
        self._on_written = on_written
        self._on_custom_loss = on_custom_loss
        self._contexts_of = contexts_of
        self._generation: _Generation | None = None

    def begin(self, setup: Setup) -> None:
        """Expect the workers of a generation. ``jax_coordinator`` has only the host yet."""
        self._generation = _Generation(setup, self._send)
        self.programs.begin()

    def send(self, command: AnyCommand, requests: Iterable[str] = ()) -> asyncio.Future[Reply]:
        """Send to all workers. The future is done when all have replied; WorkerLost when there are none.

        ``requests`` are those that it is for.
        """
        if self._generation is None:
            answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
            _fail(answer, self._absence)
            return answer
        return self._generation.send(command, self._contexts_of(requests))

    def compile(
        self, program: ProgramShape, *, lane: int, is_last: bool = False, is_hurried: bool = False
    ) -> asyncio.Future[Compiled]:
        """Have all workers compile a program. The future is done when all have reported the outcome."""
        if self._generation is None:
            answer: asyncio.Future[Compiled] = asyncio.get_running_loop().create_future()
            _fail(answer, self._absence)
            return answer
        return self._generation.compile(program, lane, is_last, is_hurried)

    @property
    def _absence(self) -> WorkerLost:
        """Why there are no workers. A command that was sent to nobody is not the cause."""
        return WorkerLost(str(self.loss or "the workers have not started"))

    async def all_ready(self) -> Ready:
        """Wait until all workers are ready. The result is the report of process 0."""
        assert self._generation is not None
        ready = await asyncio.shield(self._generation.all_ready)
        self.loss = None
        logger.info("workers: running")
        self.compiles_aside, self.compile_threads = ready.compiles_aside, ready.compile_threads
        self.kernels = ready.kernels
        self.record.ready(ready.device, ready.plan)
        return ready

    def take(self, identity: bytes, report: AnyReport) -> None:
        """Process a worker's report. Raises MeshError when it breaks the protocol."""
        generation = self._generation
        if generation is None or not self.includes(report):
            if not isinstance(report, Beat):
                logger.warning("ignored a %s of %s", type(report).__name__, _origin(report))
            return
        if isinstance(report, Written):  # sent while a command is being executed
            self._on_written(report)
            return
        if isinstance(report, CustomLossNews | CustomLossEnd):
            self._on_custom_loss(report)
            return
        if isinstance(report, Compiled):  # likewise
            generation.take_compiled(report)
            return
        if isinstance(report, Beat) and report.programs is not None:
            self.programs.take(report.programs)
        if isinstance(report, Progress) and report.process == 0:
            self.be_busy(report.message)
            logger.info("workers: %s", report.message or "running")
        generation.take(identity, report)
        if isinstance(report, Ready) and not generation.all_ready.done():
            self.be_busy("waiting for worker " + ", ".join(map(str, generation.absent())))

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
        generation, self._generation = self._generation, None
        if generation is not None:
            self.avoided |= generation.lose(loss, culprit, orders)

    def includes(self, report: AnyReport) -> bool:
        """Whether the sender of a report belongs to this generation."""
        if self._generation is None:
            return False
        setup = self._generation.setup
        return report.generation == setup.generation and 0 <= report.process < setup.num_processes

    @property
    def answered(self) -> int:
        """How many commands of this generation all workers have executed."""
        return 0 if self._generation is None else self._generation.answered

    @property
    def was_useful(self) -> bool:
        """Whether all workers of this generation have executed a command other than Compile."""
        return self._generation is not None and self._generation.was_useful

    def late(self) -> list[int]:
        """The workers that have not executed the oldest command."""
        return [] if self._generation is None else self._generation.late()

    def current(self, worker: int | None = None) -> int | None:
        """The number of the command that a worker, or the slowest, executes; None: no command."""
        return None if self._generation is None else self._generation.current(worker)

    def compiling(self) -> dict[int, str]:
        """The programs of urgent orders that all workers know of and not all have settled, by number."""
        return {} if self._generation is None else self._generation.compiling()

    def name_of(self, sequence: int) -> str:
        """The name of a command that not all workers have executed."""
        return "unknown" if self._generation is None else self._generation.name_of(sequence)


class _Generation:
    """Holds the workers and the commands of one generation."""

    def __init__(self, setup: Setup, send: Send) -> None:
        self.setup = setup
        self.all_ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.answered = 0  # commands that all workers have executed
        self.was_useful = False  # whether any of them was more than an order to compile
        self._send = send
        self._workers: dict[int, _Worker] = {}
        self._sent: deque[_Sent] = deque()  # oldest first
        self._orders: dict[int, _Order] = {}  # by number
        self._ordered = 0  # so far; also the last one's number

    def send(self, command: AnyCommand, contexts: tuple[str, ...] = ()) -> asyncio.Future[Reply]:
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        sequence, generation = self.answered + len(self._sent), self.setup.generation
        envelope = encode(
            Envelope(generation=generation, sequence=sequence, command=command, contexts=contexts)
        )
        name = command.name
        self._sent.append(_Sent(name, answer, missing=self.setup.num_processes))
        for worker in self._workers.values():
            self._send(worker.identity, envelope)  # a lost connection is noticed elsewhere
        return answer

    def compile(
        self, program: ProgramShape, lane: int, is_last: bool, is_hurried: bool
    ) -> asyncio.Future[Compiled]:
        self._ordered += 1
        command = Compile(
            number=self._ordered, program=program, lane=lane, is_last=is_last, is_hurried=is_hurried
        )
        answer: asyncio.Future[Compiled] = asyncio.get_running_loop().create_future()
        order = _Order(program, lane, self.send(command), self.setup.num_processes, answer)
        self._orders[self._ordered] = order
        return answer

    def compiling(self) -> dict[int, str]:
        """Leave out what is compiled aside, which may take as long as others need the processor."""
        return {
            number: str(order.program)
            for number, order in self._orders.items()
            if order.reply.done() and order.lane != ASIDE
        }

    def take_compiled(self, report: Compiled) -> None:
        order = self._orders.get(report.number)
        if order is None:
            return
        worst = order.worst
        if worst is None or (report.error is not None, report.seconds) > (
            worst.error is not None,
            worst.seconds,
        ):
            order.worst = report
        order.missing -= 1
        if not order.missing:
            del self._orders[report.number]
            if not order.answer.done():
                assert order.worst is not None
                order.answer.set_result(order.worst)

    def take(self, identity: bytes, report: AnyReport) -> None:
        if isinstance(report, Hello):
            self._welcome(identity, report)
            return
        worker = self._workers.get(report.process)
        if isinstance(report, Beat):  # comes over a connection of its own
            return
        if worker is None or worker.identity != identity:
            logger.warning("ignored a %s of a stranger as %s", type(report).__name__, _origin(report))
            return
        if isinstance(report, Ready):
            worker.ready = report
            if not self.absent() and not self.all_ready.done():
                leader = self._workers[0].ready
                assert leader is not None
                self.all_ready.set_result(leader)
        elif isinstance(report, Reply):
            self._take_reply(worker, report)

    def absent(self) -> list[int]:
        """The workers that are not ready."""
        return [
            number
            for number in range(self.setup.num_processes)
            if number not in self._workers or self._workers[number].ready is None
        ]

    def late(self) -> list[int]:
        return [number for number, worker in self._workers.items() if worker.replies <= self.answered]

    def current(self, worker: int | None) -> int | None:
        known = self._workers.get(worker) if worker is not None else None
        number = self.answered if known is None else known.replies
        return number if number < self.answered + len(self._sent) else None

    def name_of(self, sequence: int) -> str:
        place = sequence - self.answered
        return self._sent[place].name if 0 <= place < len(self._sent) else "done"

    def lose(
        self, loss: WorkerLost, culprit: int | None, orders: Collection[int] | None
    ) -> set[ProgramShape]:
        """Fail all futures. The result is the programs whose compilation may be the cause."""
        suspected = set()
        for number, order in self._orders.items():
            may_be = loss.by_command and (orders is None or number in orders)
            _fail(order.answer, WorkerLost(str(loss), may_be))
            suspected |= {order.program} if may_be else set()
        for number, sent in enumerate(self._sent, start=self.answered):
            _fail(sent.answer, WorkerLost(str(loss), loss.by_command and culprit in (None, number)))
        _fail(self.all_ready, loss)
        return suspected

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
        address = joined(self.setup.jax_coordinator, self.setup.jax_port or leader.jax_port)
        setup = encode(msgspec.structs.replace(self.setup, jax_coordinator=address))
        waiting = self._workers.values() if hello.process == 0 else [self._workers[hello.process]]
        for worker in waiting:
            self._send(worker.identity, setup)

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


def _fail(answer: asyncio.Future[Any], error: MeshError) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # marks it as seen: whoever waits for one future knows, and asyncio need not warn
