"""Runs the HTTP application with uvicorn, in the loop of its caller and without signal handlers."""

import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from litestar import Litestar

from spmd_tx.coordinator.connections import Connections
from spmd_tx.coordinator.header_guard import GuardedProtocol

KEEP_ALIVE_SECONDS = 75  # clients keep connections for about a minute
DRAIN_SECONDS = 3  # for requests that are being answered when the server ends


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the business of server.py, which has more to end than HTTP


class HttpServer:
    """Answers requests on a socket until it is stopped."""

    def __init__(self, app: Litestar, listening: socket.socket, connections: Connections) -> None:
        protocol: Any = partial(GuardedProtocol, connections=connections)
        config = uvicorn.Config(
            app,
            http=protocol,
            headers=[("X-Content-Type-Options", "nosniff")],
            proxy_headers=False,  # public_address.py reads them, and knows which proxies to believe
            log_config=None,
            log_level="warning",
            access_log=False,
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=DRAIN_SECONDS,
        )
        self._uvicorn = _Uvicorn(config)
        self._listening = listening

    @property
    def port(self) -> int:
        return self._listening.getsockname()[1]

    async def run(self) -> None:
        await self._uvicorn.serve(sockets=[self._listening])

    def stop(self) -> None:
        """Take no more requests; ``run`` ends when those that are here have been answered."""
        self._uvicorn.should_exit = True
