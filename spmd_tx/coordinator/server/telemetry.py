"""Sends traces and metrics to a collector by OpenTelemetry (OTLP), if its standard variables name one.

Each request with an outcome becomes a span, in the trace of its client if that has sent a ``traceparent``,
with a span for each stage; workers add spans for its commands. Metrics are those of ``/metrics``.
"""

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from spmd_tx.coordinator.requests.records import Failed
from spmd_tx.coordinator.requests.runs.recent import Timed
from spmd_tx.coordinator.requests.traces import STAGES, TracedRequest, boundaries
from spmd_tx.coordinator.runtime.containment import contained
from spmd_tx.coordinator.runtime.metrics import REGISTRY
from spmd_tx.open_telemetry import VERSION, open_metrics, open_traces, shut_down

if TYPE_CHECKING:
    from spmd_tx.coordinator.server.span_ids import RequestSpan

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 5.0  # at the end, for a collector that does not answer
NANOSECONDS = 1000  # of a microsecond
UNITS = {"seconds": "s", "bytes": "By"}  # by the end of a metric's name (ucum.org)


class Telemetry:
    """Reports requests to OpenTelemetry's SDK, which sends them from threads of its own."""

    def __init__(self, spans: Any, metrics: Any) -> None:
        """``spans`` is a TracerProvider and ``metrics`` a MeterProvider; None: they are not wanted."""
        self._providers = [provider for provider in (spans, metrics) if provider is not None]
        self._tracer = None
        self._at_work: dict[str, tuple[RequestSpan, bool]] = {}  # and whether it is sampled, by request_id
        if spans is not None:
            from spmd_tx.coordinator.server.span_ids import GivenIds

            self._sampler = spans.sampler
            spans.id_generator = self._ids = GivenIds()
            self._tracer = spans.get_tracer("spmd_tx", VERSION)
        if metrics is not None:
            _observe_all(metrics.get_meter("spmd_tx", VERSION))

    def contexts(self, at_work: Iterable[Timed]) -> tuple[str, ...]:
        """Return a traceparent for each request that is sampled: the parent of workers' spans for it."""
        if self._tracer is None:
            return ()
        with contained("telling workers the traces of requests"):
            spans = [self._span(timed) for timed in at_work]
            return tuple(span.traceparent for span, is_sampled in spans if is_sampled)
        return ()

    def ended(self, ended: Timed, failed: Failed | None) -> None:
        """Report a request that has an outcome. Raises nothing."""
        if self._tracer is not None:
            with contained("reporting a request to OpenTelemetry"):
                self._report(self._tracer, ended, failed)

    def _span(self, timed: Timed) -> "tuple[RequestSpan, bool]":
        from spmd_tx.coordinator.server.span_ids import request_span

        id = timed.request.id
        if id not in self._at_work:
            span = request_span(id, timed.times.trace)
            self._at_work[id] = span, span.is_sampled(self._sampler, timed.request.kind)
        return self._at_work[id]

    def _report(self, tracer: Any, ended: Timed, failed: Failed | None) -> None:
        from opentelemetry import trace

        request, times = ended.request, ended.times
        assert ended.finished_at is not None
        stages = (times.began_at, times.sent_at, times.replied_at)
        names = request.number, request.kind, request.line, request.seq_id, times.accepted_at
        traced = TracedRequest(*names, *stages, ended.finished_at, ended.tokens, None)
        begin, *ends = boundaries(traced, ended.finished_at)
        attributes = {"spmd_tx.line": request.line, "spmd_tx.seq_id": request.seq_id}
        attributes |= {"spmd_tx.session_id": request.session_id, "spmd_tx.number": request.number}
        if ended.tokens is not None:
            attributes["spmd_tx.tokens"] = ended.tokens
        identified, _ = self._span(ended)
        del self._at_work[request.id]
        with self._ids.given(identified):
            span = tracer.start_span(
                request.kind,
                context=identified.parent,
                kind=trace.SpanKind.SERVER,
                attributes=attributes,
                start_time=begin * NANOSECONDS,
            )
        inside = trace.set_span_in_context(span)
        compilations = [("compiling", int(first * 1e6), int(last * 1e6)) for first, last in times.compiled]
        for name, first, last in (*zip(STAGES, (begin, *ends), ends, strict=False), *compilations):
            if last > first:
                stage = tracer.start_span(name, context=inside, start_time=first * NANOSECONDS)
                stage.end(last * NANOSECONDS)
        if failed is not None:
            span.set_attribute("error.type", failed.category)
            span.set_status(trace.StatusCode.ERROR, failed.error)
        span.end(ends[-1] * NANOSECONDS)

    def close(self) -> None:
        """Send what is left, unless the collector does not answer. Blocks for FLUSH_SECONDS at most."""
        shut_down(self._providers, FLUSH_SECONDS)


def open_telemetry(environment: Mapping[str, str]) -> Telemetry | None:
    """Return where requests are reported to; None if no collector is named.

    Raises StartError as open_traces does.
    """
    spans, metrics = open_traces(environment), open_metrics(environment)
    wanted = {"traces": spans, "metrics": metrics}
    names = [name for name, provider in wanted.items() if provider is not None]
    if not names:
        return None
    logger.info("sending %s to the collector of OpenTelemetry", " and ".join(names))
    return Telemetry(spans, metrics)


def _observe_all(meter: Any) -> None:
    """Let OpenTelemetry read Prometheus' metrics: of histograms, the sum and the count."""
    for family in REGISTRY.collect():
        suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_sum", "_count"]}[family.type]
        kind = "gauge" if family.type == "gauge" else "counter"
        create = getattr(meter, f"create_observable_{kind}")
        for suffix in suffixes:
            name = family.name if suffix == "_total" else family.name + suffix
            unit = "" if suffix == "_count" else UNITS.get(family.name.rpartition("_")[2], "")
            callback = partial(_observations, family.name, family.name + suffix)
            create(name, [callback], unit=unit, description=family.documentation)


def _observations(family_name: str, sample_name: str, _: Any) -> Iterable[Any]:
    from opentelemetry.metrics import Observation

    for family in REGISTRY.collect():
        if family.name == family_name:
            yield from (
                Observation(sample.value, sample.labels)
                for sample in family.samples
                if sample.name == sample_name
            )
