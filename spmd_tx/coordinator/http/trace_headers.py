"""Reads which trace of the client a request belongs to."""

from litestar.types import ASGIApp, Receive, Scope, Send

from spmd_tx.coordinator.runtime.trace_context import HEADER, TRACEPARENT

MOST_BYTES = 200  # of a header, which has 55 today


def read_trace(app: ASGIApp) -> ASGIApp:
    """Put the header ``traceparent`` into TRACEPARENT. A middleware."""

    async def traced(scope: Scope, receive: Receive, send: Send) -> None:
        header = next((value for name, value in scope["headers"] if name == HEADER), b"")
        before = TRACEPARENT.set(header.decode("latin-1") if 0 < len(header) <= MOST_BYTES else None)
        try:
            await app(scope, receive, send)
        finally:
            TRACEPARENT.reset(before)

    return traced
