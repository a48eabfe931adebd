"""Opens what sends traces and metrics to a collector by OpenTelemetry (OTLP), as its standard variables say.

Without a collector in them, nothing of OpenTelemetry is imported.
"""

import logging
import threading
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any
from uuid import uuid4

from spmd_tx.errors import StartError

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES, METRICS = "TRACES", "METRICS"
PROTOCOL = "http/protobuf"
QUIET_SECONDS = 600.0
VERSION = version("spmd_tx")


def open_traces(environment: Mapping[str, str]) -> Any:
    """Return a TracerProvider; None if no collector of traces is named.

    Raises StartError if the packages are missing, or the protocol is another one.
    """
    if not _is_wanted(TRACES, environment):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise _missing(error) from None
    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def open_metrics(environment: Mapping[str, str]) -> Any:
    """Return a MeterProvider; None if no collector of metrics is named. Raises StartError as open_traces."""
    if not _is_wanted(METRICS, environment):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    except ImportError as error:
        raise _missing(error) from None
    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    return MeterProvider([reader], _resource(), shutdown_on_exit=False)


def shut_down(providers: Iterable[Any], seconds: float) -> None:
    """Send what is left, unless the collector does not answer. Blocks for so long at most."""
    closing = [threading.Thread(target=provider.shutdown, daemon=True) for provider in providers]
    for thread in closing:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in closing:
        thread.join(max(0.0, deadline - time.monotonic()))


class Seldom(logging.Filter):
    """Lets each logger of OpenTelemetry pass once in QUIET_SECONDS.

    While a collector does not answer, it logs every attempt to reach it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[str, float] = {}  # by logger: when

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] != "opentelemetry":
            return True
        now = time.monotonic()
        if now - self._passed.get(record.name, -QUIET_SECONDS) < QUIET_SECONDS:
            return False
        self._passed[record.name] = now
        return True


def _is_wanted(kind: str, environment: Mapping[str, str]) -> bool:
    """Raises StartError if it is wanted by another protocol."""
    is_named = environment.get(ENDPOINT) or environment.get(f"OTEL_EXPORTER_OTLP_{kind}_ENDPOINT")
    if not is_named or environment.get(f"OTEL_{kind}_EXPORTER", "").lower() == "none":
        return False
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    _check_protocol(kind, environment)
    return True


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


def _missing(error: ImportError) -> StartError:
    return StartError(
        f"{ENDPOINT} is set, but OpenTelemetry is not installed ({error}); install it with: "
        "pip install 'spmd_tx[otel]'"
    )


def _resource() -> Any:
    """Return what the server is called. Its own names give way to those of OpenTelemetry's variables."""
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    own = {"service.name": "spmd_tx", "service.version": VERSION, "service.instance.id": str(uuid4())}
    return Resource.create().merge(Resource(own)).merge(OTELResourceDetector().detect())
