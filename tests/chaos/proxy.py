"""Runs a TCP proxy that can be cut: open connections break, and new ones are refused."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any

CHUNK = 1 << 16


class Proxy:
    """Forwards a local port to another one, in its own thread."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._is_cut = False
        self._connections: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._forward, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Break every connection, and refuse new ones until ``heal``."""
        self._run(self._break())

    def heal(self) -> None:
        self._is_cut = False

    def close(self) -> None:
        self.cut()
        self._server.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _break(self) -> None:
        self._is_cut = True
        for writer in list(self._connections):
            writer.transport.abort()
        await asyncio.sleep(0)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        self._connections.add(writer)
        try:
            other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            self._connections.discard(writer)
            return
        self._connections.add(other_writer)
        await asyncio.gather(_pump(reader, other_writer), _pump(other_reader, writer))
        self._connections -= {writer, other_writer}


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(CHUNK):
            writer.write(chunk)
            await writer.drain()
    writer.transport.abort() if reader.exception() else writer.close()
