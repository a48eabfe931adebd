"""The trace that a client's request belongs to, as its W3C Trace Context header says."""

from contextvars import ContextVar

TRACEPARENT: ContextVar[str | None] = ContextVar("TRACEPARENT", default=None)  # in the task of the request
HEADER = b"traceparent"
