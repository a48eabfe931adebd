"""Decides the identifiers of a request's span before that span begins, so that workers can name it."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import NamedTuple

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import sampling
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator


class RequestSpan(NamedTuple):
    """Identifies a request's span: the same in every run of the server."""

    parent: Context  # of the client; empty if it has sent no valid traceparent
    trace_id: int
    span_id: int

    def is_sampled(self, sampler: sampling.Sampler, name: str) -> bool:
        """Return whether the SDK will record the span."""
        kind = trace.SpanKind.SERVER
        return sampler.should_sample(self.parent, self.trace_id, name, kind).decision.is_sampled()

    @property
    def traceparent(self) -> str:
        """For spans within it, in the form of W3C Trace Context."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"


def request_span(request_id: str, traceparent: str | None) -> RequestSpan:
    """Derive the identifiers from the request's, which nobody can guess."""
    parent = propagate.extract({"traceparent": traceparent or ""}, Context())
    of_client = trace.get_current_span(parent).get_span_context()
    digest = blake2b(request_id.encode(), digest_size=24).digest()
    trace_id = of_client.trace_id if of_client.is_valid else int.from_bytes(digest[:16], "big")
    return RequestSpan(parent, trace_id, int.from_bytes(digest[16:], "big"))


class GivenIds(RandomIdGenerator):
    """Gives one span the identifiers that were decided for it, and others random ones. For one thread."""

    def __init__(self) -> None:
        self._given: RequestSpan | None = None

    @contextmanager
    def given(self, span: RequestSpan) -> Iterator[None]:
        """Let the span that is started within this have these identifiers."""
        self._given = span
        try:
            yield
        finally:
            self._given = None

    def generate_trace_id(self) -> int:
        return super().generate_trace_id() if self._given is None else self._given.trace_id

    def generate_span_id(self) -> int:
        return super().generate_span_id() if self._given is None else self._given.span_id
