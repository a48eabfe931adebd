"""An agent's connection to the coordinator, which reconnects by itself."""

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum, auto
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from spmd_tx.protocol import addresses
from spmd_tx.protocol.agents import HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS, AgentReport, AnyOrder, decode_order
from spmd_tx.protocol.encoding import encode
from spmd_tx.protocol.reports import in_frames
from spmd_tx.protocol.secret import Keys

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 3.0  # for one attempt; the operating system's own retries wait ever longer
RECONNECT_SECONDS, SLOWEST_RECONNECT_SECONDS = 0.2, 2.0
TELL_SECONDS = 30.0  # between lines about a coordinator that cannot be reached
LINGER_MS = 1_000


class LinkChange(Enum):
    """What becomes of the connection."""

    CONNECTED = auto()  # a coordinator that knows the secret is there; it does not know this agent yet
    LOST = auto()  # the coordinator is gone, or silent
    REJECTED = auto()  # the other side has hung up: the secrets differ, or it is no coordinator


LinkEvent = LinkChange | AnyOrder

_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)


class AgentLink:
    """Sends reports to the coordinator and receives its orders. Lives in one asyncio loop.

    A name may stand for several addresses. ZeroMQ would try the first one alone, so the link looks which of
    them answers, at every attempt: what a name stands for changes, too.
    """

    def __init__(self, coordinator: str, keys: Keys) -> None:
        """``coordinator`` is HOST:PORT."""
        self.is_connected = False
        self.address = coordinator  # HOST:PORT with the address that has answered
        self.problem = ""  # why there is no connection
        self._host, self._port = addresses.split(coordinator)
        self._has_failed = asyncio.Event()
        self._told_at: float | None = None
        self._events: asyncio.Queue[LinkEvent] = asyncio.Queue()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        keys.introduce(self._socket)
        self._socket.immediate = True  # no message waits for a connection to perhaps another coordinator
        self._socket.heartbeat_ivl = HEARTBEAT_MS
        self._socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
        self._socket.connect_timeout = round(1000 * CONNECT_SECONDS)
        self._socket.reconnect_ivl = -1  # never: _connect does
        self._monitor = self._socket.get_monitor_socket()
        self._tasks = [
            asyncio.create_task(each) for each in (self._connect(), self._watch(), self._receive())
        ]

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

    async def _connect(self) -> None:
        """Connect, and connect again whenever that has failed."""
        delay = RECONNECT_SECONDS
        while True:
            address = await self._find()
            if address is not None:
                self._has_failed.clear()
                self._socket.ipv6 = "[" in address
                self._socket.connect(f"tcp://{address}")
                self.address = address
                await self._has_failed.wait()
                if self.is_connected:
                    self.is_connected, delay = False, RECONNECT_SECONDS
                    self._events.put_nowait(LinkChange.LOST)
                with suppress(zmq.ZMQError):  # ZeroMQ has forgotten it already
                    self._socket.disconnect(f"tcp://{address}")
            await asyncio.sleep(delay)
            delay = min(2 * delay, SLOWEST_RECONNECT_SECONDS)

    async def _find(self) -> str | None:
        """Return the first address that answers, as HOST:PORT; None, and say why, if none does."""
        problems = list[str]()
        try:
            address_infos = await asyncio.get_running_loop().getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM
            )
            for address in dict.fromkeys(_literals(address_infos)):
                try:
                    async with asyncio.timeout(CONNECT_SECONDS):
                        _, writer = await asyncio.open_connection(address, self._port)
                    writer.close()
                    return addresses.joined(address, self._port)
                except TimeoutError:
                    problems.append(f"{address} has not answered for {CONNECT_SECONDS:g} s")
                except OSError as error:
                    problems.append(f"{address}: {os.strerror(error.errno) if error.errno else error}")
        except (OSError, UnicodeError) as error:  # there is no such name, or no name can be such
            problems.append(f"{self._host}: {getattr(error, 'strerror', None) or error}")
        self.problem = "; ".join(problems)
        self._tell()
        return None

    def _tell(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._told_at is None or now - self._told_at >= TELL_SECONDS:
            self._told_at = now
            address = addresses.joined(self._host, self._port)
            logger.warning("cannot reach the coordinator at %s (%s); trying again", address, self.problem)

    async def _watch(self) -> None:
        while True:
            event = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            if event in _FAILED_HANDSHAKES:
                self._events.put_nowait(LinkChange.REJECTED)
                self._has_failed.set()
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_connected, self.problem, self._told_at = True, "", None
                self._events.put_nowait(LinkChange.CONNECTED)
            elif event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CLOSED):
                self._has_failed.set()

    async def _receive(self) -> None:
        while True:
            self._events.put_nowait(decode_order(await self._socket.recv()))


def local_address(peer: str) -> str:
    """The address of this host on the way to a peer, ADDRESS:PORT. No packet is sent."""
    family, kind, _, _, place = socket.getaddrinfo(*addresses.split(peer), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        return probe.getsockname()[0]


def _literals(address_infos: list[Any]) -> Iterator[str]:
    """Write the results of getaddrinfo as addresses, with their zones."""
    for family, _, _, _, place in address_infos:
        zone = place[3] if family == socket.AF_INET6 else 0
        yield f"{place[0]}%{zone}" if zone else place[0]
