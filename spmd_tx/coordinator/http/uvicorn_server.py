"""The uvicorn server, and the limits on connections and request headers that uvicorn does not have.

A connection ends when its request headers do not arrive in time or are too large. A connection beyond the
limit is answered with 503, unless an idle one can be dropped for it.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from litestar import Litestar
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from spmd_tx.coordinator.http.joined_writes import JoinedWrites
from spmd_tx.coordinator.http.security.connections import Connections

KEEP_ALIVE_SECONDS = 75  # clients keep connections for about a minute
DRAIN_SECONDS = 3  # for requests that are being answered when the server ends
HEADER_SECONDS = 30.0
REST_SECONDS = 30.0  # for the rest of a body after its request was answered
MAX_HEADER_BYTES = 64 << 10  # address and all headers

TOO_LARGE = "address and headers of a request may have 64 KiB together"
NO_HOST = "a request must have one header Host"
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 58\r\nconnection: close\r\nretry-after: 1\r\n\r\n"
    b"the server has too many connections; try again in a second"
)


class HttpServer:
    """Answers requests on a socket until it is stopped."""

    def __init__(
        self,
        app: Litestar,
        listening: socket.socket,
        connections: Connections,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        protocol: Any = partial(GuardedProtocol, connections=connections)
        config = uvicorn.Config(
            app,
            http=protocol,
            headers=[("X-Content-Type-Options", "nosniff")],
            proxy_headers=False,  # public_address.py reads them, and knows the trusted proxies
            log_config=None,
            log_level="warning",
            access_log=False,
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=DRAIN_SECONDS,
            ssl_context_factory=None if tls is None else lambda *_: tls,
        )
        self._uvicorn = _Uvicorn(config)
        self._listening = listening

    @property
    def port(self) -> int:
        return self._listening.getsockname()[1]

    async def run(self) -> None:
        await self._uvicorn.serve(sockets=[self._listening])

    def stop(self) -> None:
        """Accept no more requests; ``run`` returns when those in progress have been answered."""
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # server/serve.py handles signals: it has more to end than HTTP


class GuardedProtocol(HttpToolsProtocol):
    """Guards one connection. Between two requests uvicorn itself ends it (timeout_keep_alive)."""

    def __init__(self, *arguments: Any, connections: Connections, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._all = connections
        self._is_admitted = False
        self._header_bytes = 0
        self._in_header = False
        self._complaint: str | None = None
        self._alarm: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        address = transport.get_extra_info("peername")
        self._is_admitted = self._all.admit(self, address[0] if address else "")
        if not self._is_admitted:
            transport.write(FULL)
            transport.close()
            return
        joined: Any = JoinedWrites(transport, self.loop)
        super().connection_made(joined)
        self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_admitted:
            self._cancel_alarm()
            self._all.leave(self)
            super().connection_lost(exc)

    def drop(self) -> None:
        """Make room for another connection, while no request of this one is being answered."""
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        if not self._is_admitted:
            return
        super().data_received(data)
        if not self._in_header:
            self._expect_more()
            return
        self._header_bytes += len(data)
        if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(TOO_LARGE)

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(self._complaint or msg)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_header()

    def on_headers_complete(self) -> None:
        self._in_header = False
        self._cancel_alarm()
        assert self.parser is not None, "it is there until the connection is lost"
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() != "1.0"):
            self._complaint = NO_HOST
            raise ValueError(NO_HOST)  # to the parser, which then reports an invalid request
        self._all.begin(self)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._cancel_alarm()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._all.end(self)
            if self.cycle.more_body:
                self._set_alarm(REST_SECONDS)

    def _expect_header(self) -> None:
        self._header_bytes, self._in_header = 0, True
        self._set_alarm(HEADER_SECONDS)

    def _expect_more(self) -> None:
        """Watch the connection after data that is no part of a request, since uvicorn does not."""
        is_idle = self.cycle is not None and self.cycle.response_complete
        if is_idle and self._alarm is None and not self.transport.is_closing():
            self._set_alarm(HEADER_SECONDS)

    def _set_alarm(self, seconds: float) -> None:
        self._cancel_alarm()
        self._alarm = self.loop.call_later(seconds, self.transport.close)

    def _cancel_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
