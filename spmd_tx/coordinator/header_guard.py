"""Ends connections whose request headers do not come, or do not end. uvicorn bounds neither."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADER_SECONDS = 30.0
MAX_HEADER_BYTES = 64 << 10  # address and all headers

TOO_LARGE = "address and headers of a request may have 64 KiB together"


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Between two requests it is uvicorn's to end (timeout_keep_alive)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._header_bytes = 0
        self._in_header = False
        self._alarm: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._expect_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._calm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_header:
            return
        self._header_bytes += len(data)
        if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response(TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_header()

    def on_headers_complete(self) -> None:
        self._in_header = False
        self._calm()
        super().on_headers_complete()

    def _expect_header(self) -> None:
        self._calm()
        self._header_bytes, self._in_header = 0, True
        self._alarm = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _calm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
