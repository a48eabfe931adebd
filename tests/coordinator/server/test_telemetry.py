"""OpenTelemetry, with a collector that takes OTLP over HTTP."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version

import httpx
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from spmd_tx.coordinator.http.app import make_app
from spmd_tx.coordinator.requests.records import Failed, Request, RequestTimes
from spmd_tx.coordinator.requests.runs.recent import Timed
from spmd_tx.coordinator.runtime.metrics import REGISTRY
from spmd_tx.coordinator.server.telemetry import Telemetry, open_telemetry
from spmd_tx.errors import StartError
from tests.coordinator.conftest import BASE_MODEL, run_services
from tests.coordinator.http.tinker.test_sampling import sample

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
MESSAGES = {"/v1/traces": ExportTraceServiceRequest, "/v1/metrics": ExportMetricsServiceRequest}


@pytest.fixture
def collector(monkeypatch):
    """Collects what is exported: (path, message)."""
    found = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            found.append((self.path, MESSAGES[self.path].FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=node-a,team=red%20blue")
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


async def test_a_request_is_a_span_in_the_trace_of_its_client_and_metrics_are_sent(collector, tmp_path):
    def sampled() -> float:
        return REGISTRY.get_sample_value("spmd_tx_requests_total", {"kind": "sample", "error": ""}) or 0.0

    before = sampled()
    async with run_services(tmp_path) as services:
        transport = httpx.ASGITransport(make_app(services))
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        async with httpx.AsyncClient(transport=transport, base_url="http://server/api/v1") as client:
            body = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0", "type": "create_session"}
            session = (await client.post("create_session", json=body)).json()["session_id"]
            body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE_MODEL}
            sampler = (await client.post("create_sampling_session", json=body)).json()["sampling_session_id"]
            for seq_id, sent in enumerate([headers, {}]):
                body = sample(sampler, seq_id=seq_id)
                future = (await client.post("asample", json=body, headers=sent)).json()
                answer = await client.post("retrieve_future", json={"request_id": future["request_id"]})
                assert answer.status_code == 200
    assert sampled() == before + 2
    messages = [message for path, message in collector if path == "/v1/traces"]
    resources = [each for message in messages for each in message.resource_spans]
    names = {each.key: each.value.string_value for each in resources[0].resource.attributes}
    assert names["service.name"] == "spmd_tx"
    assert names["service.version"] == version("spmd_tx")
    assert (names["service.instance.id"], names["team"]) == ("node-a", "red blue")
    spans = [span for each in resources for scope in each.scope_spans for span in scope.spans]
    ours = [span for span in spans if span.trace_id.hex() == TRACE]
    (request,) = [span for span in ours if span.name == "sample"]
    assert request.parent_span_id.hex() == PARENT
    assert {each.key: each.value.int_value for each in request.attributes}["spmd_tx.seq_id"] == 0
    stages = [span for span in ours if span is not request]
    assert stages
    assert {span.parent_span_id for span in stages} == {request.span_id}
    assert {span.name for span in stages} <= {"queued", "batched", "device", "encoded"}
    assert sum(each.end_time_unix_nano - each.start_time_unix_nano for each in stages) == (
        request.end_time_unix_nano - request.start_time_unix_nano
    )
    (other,) = [span for span in spans if span.name == "sample" and span is not request]
    assert other.trace_id.hex() != TRACE
    assert not other.parent_span_id
    metrics = [
        metric.name
        for path, message in collector
        if path == "/v1/metrics"
        for resource in message.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    ]
    assert {"spmd_tx_unfinished_requests", "spmd_tx_internal_errors", "spmd_tx_snapshot_seconds_count"} <= {
        *metrics
    }


def test_a_failure_says_whose_fault_it_is():
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    request = Request(1, "id", "forward_backward", "model", 0, "session")
    timed = Timed(request, RequestTimes(accepted_at=1.0), finished_at=2.0)
    Telemetry(provider, None).ended(timed, Failed("token 7 is unknown", "user"))
    (span,) = [span for span in spans.get_finished_spans() if span.parent is None]
    assert span.attributes["error.type"] == "user"
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "token 7 is unknown")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_SERVICE_NAME": "x"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"},
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318",
            "OTEL_TRACES_EXPORTER": "none",
            "OTEL_METRICS_EXPORTER": "none",
        },
    ],
)
def test_it_is_off_unless_a_collector_is_named(environment):
    assert open_telemetry(environment) is None


GRPC = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}


@pytest.mark.parametrize("traces", [{}, {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": ""}])
def test_another_protocol_is_refused(traces):
    with pytest.raises(StartError, match=r"OTLP_PROTOCOL is 'grpc'; this server has http/protobuf only"):
        open_telemetry(GRPC | traces)


def test_the_protocol_of_a_kind_counts_more_than_that_of_all():
    protocol = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_METRICS_EXPORTER": "none"}
    telemetry = open_telemetry(GRPC | protocol)
    assert telemetry is not None
    telemetry.close()
