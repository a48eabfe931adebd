"""A connection that sends what is written to it in one turn of the event loop together.

An answer is written in two parts, its headers and its body. Sent apart they cost two system calls here, and
wake the client twice.
"""

import asyncio
from typing import Any

MOST_HELD = 64 << 10  # bytes; more are sent at once, so that writers are held up as soon as clients are slow


class JoinedWrites:
    """Stands in for a transport of asyncio."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held: list[bytes] = []
        self._held_bytes = 0

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self._send)
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes >= MOST_HELD:
            self._send()

    def close(self) -> None:
        """Send what is held, and hang up."""
        self._send()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _send(self) -> None:
        held, self._held, self._held_bytes = self._held, [], 0
        if held and not self._transport.is_closing():
            self._transport.write(b"".join(held))  # writelines does not hold writers up before Python 3.12.9
