"""Sends traces and metrics to a collector by OpenTelemetry (OTLP), if its standard variables name one.

Each request with an outcome becomes a span, in the trace of its client if that has sent a ``traceparent``,
with a span for each stage. Metrics are those of ``/metrics``.
"""

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any
from uuid import uuid4

from spmd_tx.coordinator.requests.records import Failed
from spmd_tx.coordinator.requests.runs.recent import Timed
from spmd_tx.coordinator.requests.traces import STAGES, TracedRequest, boundaries
from spmd_tx.coordinator.runtime.containment import contained
from spmd_tx.coordinator.runtime.metrics import REGISTRY
from spmd_tx.errors import StartError

logger = logging.getLogger(__name__)

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES, METRICS = "TRACES", "METRICS"
PROTOCOL = "http/protobuf"
FLUSH_SECONDS = 5.0  # at the end, for a collector that does not answer
NANOSECONDS = 1000  # of a microsecond


class Telemetry:
    """Reports requests to OpenTelemetry's SDK, which sends them from threads of its own."""

    def __init__(self, spans: Any, metrics: Any) -> None:
        """``spans`` is a TracerProvider and ``metrics`` a MeterProvider; None: they are not wanted."""
        self._providers = [provider for provider in (spans, metrics) if provider is not None]
        self._tracer = None if spans is None else spans.get_tracer("spmd_tx", version("spmd_tx"))
        if metrics is not None:
            _observe_all(metrics.get_meter("spmd_tx", version("spmd_tx")))

    def ended(self, ended: Timed, failed: Failed | None) -> None:
        """Report a request that has an outcome. Raises nothing."""
        if self._tracer is not None:
            with contained("reporting a request to OpenTelemetry"):
                self._report(self._tracer, ended, failed)

    def _report(self, tracer: Any, ended: Timed, failed: Failed | None) -> None:
        from opentelemetry import propagate, trace
        from opentelemetry.context import Context

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
        span = tracer.start_span(
            request.kind,
            context=propagate.extract({"traceparent": times.trace or ""}, Context()),
            kind=trace.SpanKind.SERVER,
            attributes=attributes,
            start_time=begin * NANOSECONDS,
        )
        inside = trace.set_span_in_context(span)
        waits = [("compiling", int(first * 1e6), int(last * 1e6)) for first, last in times.compiled]
        for name, first, last in (*zip(STAGES, (begin, *ends), ends, strict=False), *waits):
            if last > first:
                stage = tracer.start_span(name, context=inside, start_time=first * NANOSECONDS)
                stage.end(last * NANOSECONDS)
        if failed is not None:
            span.set_attribute("error.type", failed.category)
            span.set_status(trace.StatusCode.ERROR, failed.error)
        span.end(ends[-1] * NANOSECONDS)

    def close(self) -> None:
        """Send what is left, unless the collector does not answer. Blocks for FLUSH_SECONDS at most."""
        closing = [threading.Thread(target=provider.shutdown, daemon=True) for provider in self._providers]
        for thread in closing:
            thread.start()
        deadline = time.monotonic() + FLUSH_SECONDS
        for thread in closing:
            thread.join(max(0.0, deadline - time.monotonic()))


def open_telemetry(environment: Mapping[str, str]) -> Telemetry | None:
    """Return where requests are reported to; None if no collector is named.

    Raises StartError if the packages are missing, or the protocol is another one.
    """
    wanted = [kind for kind in (TRACES, METRICS) if _is_wanted(kind, environment)]
    if not wanted or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    for kind in wanted:
        _check_protocol(kind, environment)
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise StartError(
            f"{ENDPOINT} is set, but OpenTelemetry is not installed ({error}); install it with: "
            "pip install 'spmd_tx[otel]'"
        ) from None
    resource = _resource()
    spans = metrics = None
    if TRACES in wanted:
        spans = TracerProvider(resource=resource, shutdown_on_exit=False)
        spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    if METRICS in wanted:
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        metrics = MeterProvider([reader], resource, shutdown_on_exit=False)
    logger.info("sending %s to the collector of OpenTelemetry", " and ".join(wanted).lower())
    return Telemetry(spans, metrics)


def _is_wanted(kind: str, environment: Mapping[str, str]) -> bool:
    is_named = environment.get(ENDPOINT) or environment.get(f"OTEL_EXPORTER_OTLP_{kind}_ENDPOINT")
    return bool(is_named) and environment.get(f"OTEL_{kind}_EXPORTER", "").lower() != "none"


def _check_protocol(kind: str, environment: Mapping[str, str]) -> None:
    """Raise StartError unless it is PROTOCOL. The variable of a kind counts more than that of all."""
    for name in (f"OTEL_EXPORTER_OTLP_{kind}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environment.get(name)
        if protocol == PROTOCOL:
            return
        if protocol:
            raise StartError(
                f"{name} is {protocol!r}; this server has {PROTOCOL} only, which collectors take on port 4318"
            )


def _resource() -> Any:
    """Return what the server is called. Its own names give way to those of OpenTelemetry's variables."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    own = {
        "service.name": "spmd_tx",
        "service.version": version("spmd_tx"),
        "service.instance.id": str(uuid4()),
    }
    return Resource.create().merge(Resource(own)).merge(OTELResourceDetector().detect())


def _observe_all(meter: Any) -> None:
    """Let OpenTelemetry read Prometheus' metrics: of histograms, the sum and the count."""
    for family in REGISTRY.collect():
        suffixes = {"counter": ["_total"], "gauge": [""], "histogram": ["_sum", "_count"]}[family.type]
        kind = "gauge" if family.type == "gauge" else "counter"
        create = getattr(meter, f"create_observable_{kind}")
        for suffix in suffixes:
            name = family.name if suffix == "_total" else family.name + suffix
            callback = partial(_observations, family.name, family.name + suffix)
            create(name, [callback], description=family.documentation)


def _observations(family_name: str, sample_name: str, _: Any) -> Iterable[Any]:
    from opentelemetry.metrics import Observation

    for family in REGISTRY.collect():
        if family.name == family_name:
            yield from (
                Observation(sample.value, sample.labels)
                for sample in family.samples
                if sample.name == sample_name
            )
