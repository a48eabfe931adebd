"""The one socket that agents and workers connect to: encrypted, and only for those who know the secret."""

import asyncio
import errno
import logging
from typing import cast

import zmq
import zmq.asyncio
from zmq.utils import z85

from spmd_tx.errors import StartError
from spmd_tx.protocol.addresses import joined
from spmd_tx.protocol.agents import HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS, AnyAgentReport, decode_any_report
from spmd_tx.protocol.reports import FRAME_BYTES, AnyReport
from spmd_tx.protocol.secret import Keys

logger = logging.getLogger(__name__)

# The most that strangers can cost the port: a connection for this long, and a frame of this size.
HANDSHAKE_MS = 5_000
LONGEST_FRAME = FRAME_BYTES + 1024  # the overhead of encryption included

FIRST_FRAME = zmq.NOBLOCK | zmq.SNDMORE  # says to whom the message behind it goes

LEAST_UNCOPIED = 1 << 16  # bytes of a message; to copy fewer takes less time than to keep them

EVERY_ADDRESS = ("0.0.0.0", "::")


class WorkerPort:
    """Receives from and sends to agents and workers of all generations. Lives in one asyncio loop."""

    def __init__(self, host: str, port: int, keys: Keys) -> None:
        self._context = zmq.Context(io_threads=2)  # encryption takes 2 ms per MB and worker
        self._gate = zmq.asyncio.Context(self._context).socket(zmq.REP)
        self._gate.bind("inproc://zeromq.zap.01")  # the address that ZeroMQ's specification gives
        self._guarding = asyncio.create_task(self._guard(z85.decode(keys.client_public)))
        self._socket = self._context.socket(zmq.ROUTER)
        keys.guard(self._socket)
        self._socket.set_hwm(0)  # a dropped command would be a gap
        self._socket.maxmsgsize = LONGEST_FRAME
        self._socket.handshake_ivl = HANDSHAKE_MS
        self._socket.router_mandatory = True  # makes sending to a closed connection an error
        self._socket.heartbeat_ivl = HEARTBEAT_MS
        self._socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
        self._has_arrivals = asyncio.Event()
        self._fd = cast(int, self._socket.getsockopt(zmq.FD))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._look)
        self.host, self.port = host, self._bind(host, port)

    @property
    def local_address(self) -> str:
        """HOST:PORT for processes of this host."""
        return joined("127.0.0.1" if self.host in EVERY_ADDRESS else self.host, self.port)

    async def receive(self) -> tuple[bytes, AnyReport | AnyAgentReport]:
        """The next report, with the identity of its sender."""
        while True:
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
                return identity, decode_any_report(b"".join(frames))
            except zmq.Again:
                self._has_arrivals.clear()
                await self._has_arrivals.wait()
            except (ValueError, TypeError) as problem:
                logger.warning("ignored a message that is not a report: %s", problem)

    def send(self, identity: bytes, message: bytes) -> bool:
        """Send without waiting; False if the connection is gone."""
        try:
            self._socket.send(identity, FIRST_FRAME)
            self._socket.send(message, zmq.NOBLOCK, copy=len(message) < LEAST_UNCOPIED)
        except zmq.ZMQError as problem:
            if problem.errno != errno.EHOSTUNREACH:
                raise
            return False
        finally:
            self._look()
        return True

    def _look(self) -> None:
        """Wake the receiver if there is something. ZeroMQ says so once, perhaps while it sends."""
        if cast(int, self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._has_arrivals.set()

    def close(self, linger: float = 0.0) -> None:
        """Disconnect all, and give messages on their way ``linger`` seconds at most."""
        self._guarding.cancel()
        self._loop.remove_reader(self._fd)
        self._gate.close(linger=0)
        self._socket.close(linger=round(1000 * linger))
        self._context.term()

    async def _guard(self, expected: bytes) -> None:
        """Let only clients with the expected key connect (rfc.zeromq.org/spec/27)."""
        while True:
            version, request, *_, mechanism, key = await self._gate.recv_multipart()
            may_connect = (mechanism, key) == (b"CURVE", expected)
            answer = (b"200", b"OK") if may_connect else (b"400", b"another secret")
            await self._gate.send_multipart([version, request, *answer, b"", b""])

    def _bind(self, host: str, port: int) -> int:
        self._socket.ipv6 = ":" in host  # and, on all addresses, IPv4 too
        try:
            self._socket.bind(f"tcp://{joined('*' if host in EVERY_ADDRESS else host, port or '*')}")
        except zmq.ZMQError as error:
            self.close()
            if error.errno == errno.EADDRINUSE:
                raise StartError(
                    f"port {port} of {host} is in use; end that program, or set another --worker-port"
                ) from None
            raise StartError(
                f"cannot listen for workers on {host}, port {port}: {error}; "
                "check --worker-host, which is an address of this machine, and --worker-port"
            ) from None
        endpoint = cast(bytes, self._socket.getsockopt(zmq.LAST_ENDPOINT))
        return int(endpoint.rstrip(b"\0").rpartition(b":")[2])
