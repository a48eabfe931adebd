"""An agent's connection to the coordinator, which reconnects by itself."""

import asyncio
import socket
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from spmd_tx.protocol.agents import HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS, AgentReport, AnyOrder, decode_order
from spmd_tx.protocol.encoding import encode
from spmd_tx.protocol.reports import in_frames
from spmd_tx.protocol.secret import Keys

CONNECT_MS = 3_000  # for one attempt; the operating system's own retries wait ever longer
RECONNECT_MS, SLOWEST_RECONNECT_MS = 200, 2_000
LINGER_MS = 1_000


@dataclass(frozen=True)
class Connected:
    """A coordinator that knows the secret is there; it does not know this agent yet."""


@dataclass(frozen=True)
class Lost:
    """The coordinator is gone, or silent."""


@dataclass(frozen=True)
class Rejected:
    """The other side has hung up: the secrets differ, or it is no coordinator."""


LinkEvent = Connected | Lost | Rejected | AnyOrder

_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)


class AgentLink:
    """Sends reports to the coordinator and receives its orders. Lives in one asyncio loop."""

    def __init__(self, address: str, keys: Keys) -> None:
        self.is_connected = False
        self._events: asyncio.Queue[LinkEvent] = asyncio.Queue()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        keys.introduce(self._socket)
        self._socket.immediate = True  # no message waits for a connection to perhaps another coordinator
        self._socket.heartbeat_ivl = HEARTBEAT_MS
        self._socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
        self._socket.connect_timeout = CONNECT_MS
        self._socket.reconnect_ivl = RECONNECT_MS
        self._socket.reconnect_ivl_max = SLOWEST_RECONNECT_MS
        self._monitor = self._socket.get_monitor_socket()
        self._socket.connect(f"tcp://{address}")
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._receive())]

    async def next(self) -> LinkEvent:
        """The coordinator's next order, or the next change of the connection."""
        return await self._events.get()

    def send(self, report: AgentReport) -> None:
        """Send a report, if there is a connection."""
        if self.is_connected:
            self._socket.send_multipart(in_frames(encode(report)))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=LINGER_MS if self.is_connected else 0)
        self._context.term()

    async def _watch(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            if event in _FAILED_HANDSHAKES:
                self._events.put_nowait(Rejected())
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_connected = True
                self._events.put_nowait(Connected())
            elif event == zmq.EVENT_DISCONNECTED and self.is_connected:
                self.is_connected = False
                self._events.put_nowait(Lost())

    async def _receive(self) -> None:
        while True:
            self._events.put_nowait(decode_order(await self._socket.recv()))


def local_address(peer: str) -> str:
    """The address of this host on the way to a peer, HOST:PORT. No packet is sent."""
    host, _, port = peer.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return probe.getsockname()[0]
