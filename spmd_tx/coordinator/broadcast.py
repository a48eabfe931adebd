"""The hub: sends every command to all workers over ZeroMQ, numbered, and gathers their replies in order."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec
import zmq
import zmq.asyncio

from spmd_tx.errors import CommandGap, MeshError, WorkerLost
from spmd_tx.protocol import (
    PROTOCOL_VERSION,
    AnyCommand,
    AnyReport,
    Envelope,
    Failure,
    Hello,
    Progress,
    Ready,
    Reply,
    Setup,
    Written,
    decode_report,
    encode,
)

logger = logging.getLogger(__name__)


@dataclass
class _Worker:
    """What is known of one worker of this generation."""

    identity: bytes
    ready: Ready | None = None
    replies: int = 0  # so far; also the number of the next one


@dataclass
class _Sent:
    """A command on its way, or waiting until all workers are ready."""

    answer: asyncio.Future[Reply]
    missing: int  # workers that have not replied
    reply: Reply | None = field(default=None)  # of process 0


class Hub:
    """All worker processes of one generation, as one. Lives in one asyncio loop."""

    def __init__(self, setup: Setup, host: str = "127.0.0.1") -> None:
        self.on_written: Callable[[Written], None] = lambda report: None
        self.busy: str | None = "starting"  # what process 0 does instead of running commands
        self._setup = setup
        self._workers: dict[int, _Worker] = {}
        self._sent: deque[_Sent] = deque()  # oldest first
        self._answered = 0
        self._held: list[bytes] = []  # commands from before all workers were ready
        self._all_ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._lost: MeshError | None = None
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)  # a dropped command would be a gap
        self._port = self._socket.bind_to_random_port(f"tcp://{host}")
        self._host = host

    @property
    def address(self) -> str:
        return f"tcp://{self._host}:{self._port}"

    def send(self, command: AnyCommand) -> asyncio.Future[Reply]:
        """Send to all workers, or hold back until all are ready; the reply is there when all have replied."""
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if self._lost is not None:
            _fail(answer, self._lost)
            return answer
        sequence = self._answered + len(self._sent)
        envelope = encode(Envelope(generation=self._setup.generation, sequence=sequence, command=command))
        self._sent.append(_Sent(answer, missing=self._setup.num_processes))
        if self._all_ready.done():
            self._send_to_all(envelope)
        else:
            self._held.append(envelope)
        return answer

    async def all_ready(self) -> Ready:
        """What process 0 said when it was ready, once all are."""
        return await asyncio.shield(self._all_ready)

    async def run(self) -> NoReturn:
        """Receive, until a worker reports a failure or breaks the protocol: a MeshError.

        Commands hear of it from ``lose``, by when more may be known of what happened.
        """
        while True:
            identity, *frames = await self._socket.recv_multipart()
            report = _decode(b"".join(frames))
            if report is not None and self._is_of_this_generation(report):
                self._take(identity, report)

    def lose(self, error: MeshError) -> None:
        """There will be no more replies: every command, sent or still to be sent, has this error."""
        self._lost = self._lost or error
        while self._sent:
            _fail(self._sent.popleft().answer, self._lost)

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()

    def _take(self, identity: bytes, report: AnyReport) -> None:
        if isinstance(report, Hello):
            self._welcome(identity, report)
            return
        if isinstance(report, Written):  # sent aside, while a command is carried out
            self.on_written(report)
            return
        worker = self._workers.get(report.process)
        if worker is None or worker.identity != identity:
            logger.warning("ignored a %s of a stranger as worker %d", type(report).__name__, report.process)
            return
        match report:
            case Progress(message=message):
                if report.process == 0:
                    self.busy = message or None
                    logger.info("workers: %s", message or "running")
            case Ready():
                worker.ready = report
                self._start_when_all_are_ready()
            case Reply():
                self._take_reply(worker, report)
            case Failure(process=process, message=message, traceback=traceback):
                logger.error("worker %d failed:\n%s", process, traceback)
                raise WorkerLost(f"worker {process} failed: {message}")

    def _welcome(self, identity: bytes, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            raise WorkerLost(
                f"worker {hello.process} speaks protocol {hello.version} and this server {PROTOCOL_VERSION}; "
                "install the same version of spmd_tx on all hosts"
            )
        if hello.process in self._workers:
            logger.warning("ignored a second worker %d", hello.process)
            return
        self._workers[hello.process] = _Worker(identity)
        self._socket.send_multipart([identity, encode(self._setup)])

    def _start_when_all_are_ready(self) -> None:
        if self._all_ready.done():
            return
        absent = [
            number
            for number in range(self._setup.num_processes)
            if number not in self._workers or self._workers[number].ready is None
        ]
        if absent:
            self.busy = "waiting for worker " + ", ".join(map(str, absent))
            return
        self.busy = None
        leader = self._workers[0].ready
        assert leader is not None
        self._all_ready.set_result(leader)
        held, self._held = self._held, []
        for envelope in held:
            self._send_to_all(envelope)

    def _take_reply(self, worker: _Worker, reply: Reply) -> None:
        if reply.sequence != worker.replies or reply.sequence >= self._answered + len(self._sent):
            raise CommandGap(
                f"worker {reply.process}: expected the reply to command {worker.replies}, "
                f"received {reply.sequence}"
            )
        worker.replies += 1
        sent = self._sent[reply.sequence - self._answered]
        sent.missing -= 1
        if reply.process == 0:
            sent.reply = reply
        while self._sent and not self._sent[0].missing:
            first = self._sent.popleft()
            self._answered += 1
            if not first.answer.done():
                assert first.reply is not None
                first.answer.set_result(first.reply)

    def _send_to_all(self, envelope: bytes) -> None:
        for worker in self._workers.values():
            self._socket.send_multipart([worker.identity, envelope], copy=False)

    def _is_of_this_generation(self, report: AnyReport) -> bool:
        if report.generation == self._setup.generation and report.process < self._setup.num_processes:
            return True
        logger.warning(
            "ignored a %s of worker %d, generation %d; this is generation %d with %d workers",
            type(report).__name__,
            report.process,
            report.generation,
            self._setup.generation,
            self._setup.num_processes,
        )
        return False


def _decode(message: bytes) -> AnyReport | None:
    try:
        return decode_report(message)
    except (msgspec.DecodeError, ValueError, TypeError) as problem:
        logger.warning("ignored a message that is no report: %s", problem)
        return None


def _fail(answer: asyncio.Future[Reply], error: MeshError) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # it is known to whoever waits for any of them; no need to complain about the rest
