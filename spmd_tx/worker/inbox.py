"""The worker's connection: receives commands in order, or fails, and sends reports."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from spmd_tx.errors import CommandGap, MeshError
from spmd_tx.protocol.encoding import decode_to_worker, encode
from spmd_tx.protocol.envelope import Envelope
from spmd_tx.protocol.reports import Hello, Report, in_frames
from spmd_tx.protocol.secret import Keys
from spmd_tx.protocol.setup import Setup
from spmd_tx.worker.result_signal import ResultSignal

logger = logging.getLogger(__name__)

# A dead process closes its connection at once. A dead host does not; ZeroMQ's heartbeats detect that.
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 15_000
LINGER_MS = 2_000  # at the end, for the last report to be sent
ASIDE_LINGER_MS = 60_000  # for a report that somebody waits for: it may be large, the coordinator slow


class Inbox:
    """Holds the connection to the coordinator. For one thread."""

    def __init__(self, coordinator: str, process: int, generation: int, keys: Keys) -> None:
        self.executing: int | None = None  # the sequence number of the command in progress
        self._coordinator = coordinator
        self._keys = keys
        self._origin = {"process": process, "generation": generation}
        self._generation = generation
        self._next = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        keys.introduce(self._socket)
        self._socket.set_hwm(0)  # a dropped command would be a gap
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._socket.ipv6 = "[" in coordinator
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(coordinator)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def hello(self, timeout: float, jax_port: int = 0) -> Setup:
        """Introduce this worker. Raises MeshError when nobody answers within ``timeout`` seconds."""
        self.report(Hello, jax_port=jax_port)
        while (message := self._receive(timeout)) is not None:
            if isinstance(message, Setup) and message.generation == self._generation:
                return message
            self._ignore(message)
        raise MeshError(
            f"the coordinator at {self._coordinator} did not answer within {timeout:g} s; "
            f"either it is not running, or it has no place for {self._name}"
        )

    def next(self) -> Envelope:
        """Wait for the next command."""
        while True:
            envelope = self._take(self._receive(None))
            if envelope is not None:
                return envelope

    def next_if_there(self) -> Envelope | None:
        """Return the next command if it has already arrived."""
        while (message := self._receive(0.0)) is not None:
            envelope = self._take(message)
            if envelope is not None:
                return envelope
        return None

    def next_unless(self, signal: ResultSignal) -> Envelope | None:
        """Wait for the next command; None: what was computed is complete before there is one."""
        self._poller.register(signal, zmq.POLLIN)
        try:
            while True:
                message = self._receive(None)
                if message is None and signal.is_over():
                    return None
                envelope = None if message is None else self._take(message)
                if envelope is not None:
                    return envelope
        finally:
            self._poller.unregister(signal)

    def report(self, kind: type[Report], **fields: Any) -> None:
        """Send a report of this worker."""
        self._socket.send_multipart(in_frames(encode(kind(**self._origin, **fields))))

    def report_aside(self, kind: type[Report], **fields: Any) -> None:
        """Send a report from any thread, over a connection of its own."""
        with self.aside(ASIDE_LINGER_MS) as report:
            report(kind, **fields)

    @contextmanager
    def aside(self, linger_ms: int = LINGER_MS) -> Iterator[Callable[..., object]]:
        """Yield a function like ``report`` with its own connection, for the thread that enters this."""
        with self._context.socket(zmq.DEALER) as socket:
            self._keys.introduce(socket)
            socket.linger = linger_ms
            socket.ipv6 = self._socket.ipv6
            socket.connect(self._coordinator)
            yield lambda kind, **fields: socket.send_multipart(
                in_frames(encode(kind(**self._origin, **fields)))
            )

    def close(self) -> None:
        """Send pending reports, if that is possible within LINGER_MS, and disconnect."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=LINGER_MS)
        self._context.term()

    @property
    def _name(self) -> str:
        return f"worker {self._origin['process']} of generation {self._generation}"

    def _receive(self, timeout: float | None) -> Setup | Envelope | None:
        """Receive the next message; None when there is none for ``timeout`` seconds."""
        ready = dict(self._poller.poll(None if timeout is None else round(timeout * 1000)))
        if self._socket in ready:  # messages from before a lost connection still count
            return decode_to_worker(self._socket.recv())
        if self._monitor in ready:
            recv_monitor_message(self._monitor)
            # The coordinator would not recognize a new connection.
            raise MeshError(f"{self._name} has lost the coordinator at {self._coordinator}")
        return None

    def _take(self, message: Setup | Envelope | None) -> Envelope | None:
        """Return the message if it is this generation's next command. Raises CommandGap if one is missing."""
        if not isinstance(message, Envelope) or message.generation != self._generation:
            self._ignore(message)
            return None
        if message.sequence != self._next:
            raise CommandGap(f"{self._name}: expected command {self._next}, received {message.sequence}")
        self._next += 1
        return message

    def _ignore(self, message: Setup | Envelope | None) -> None:
        generation = message.generation if message else None
        logger.warning("%s ignored a %s of generation %s", self._name, type(message).__name__, generation)
