"""A collector that takes OpenTelemetry's messages over HTTP, and keeps them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

MESSAGES = {"/v1/traces": ExportTraceServiceRequest, "/v1/metrics": ExportMetricsServiceRequest}


@dataclass
class Collector:
    """Holds what came so far."""

    endpoint: str  # for OTEL_EXPORTER_OTLP_ENDPOINT
    messages: list[tuple[str, Any]] = field(default_factory=list)  # path, and what was sent to it

    @property
    def resources(self) -> list[Any]:
        """The ResourceSpans."""
        traces = [message for path, message in self.messages if path == "/v1/traces"]
        return [each for message in traces for each in message.resource_spans]

    @property
    def spans(self) -> list[Any]:
        return [span for each in self.resources for scope in each.scope_spans for span in scope.spans]

    @property
    def metrics(self) -> list[Any]:
        found = [message for path, message in self.messages if path == "/v1/metrics"]
        scopes = [
            scope for message in found for each in message.resource_metrics for scope in each.scope_metrics
        ]
        return [metric for scope in scopes for metric in scope.metrics]


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector. Its senders must not compress (OTEL_EXPORTER_OTLP_COMPRESSION)."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.messages.append((self.path, MESSAGES[self.path].FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield collector
    server.shutdown()
    thread.join()
    server.server_close()


def values(attributes: Any) -> dict[str, Any]:
    """Return the attributes of a span or a resource by their names."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
