"""OpenTelemetry, with a collector that takes OTLP over HTTP."""

from importlib.metadata import version

import httpx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanKind, StatusCode

from spmd_tx.coordinator.http.app import make_app
from spmd_tx.coordinator.requests.records import Failed, Request, RequestTimes
from spmd_tx.coordinator.requests.runs.recent import Timed
from spmd_tx.coordinator.runtime.metrics import REGISTRY, show_group
from spmd_tx.coordinator.server.telemetry import Telemetry, open_telemetry
from spmd_tx.errors import StartError
from spmd_tx.group_names import MAIN
from tests.coordinator.conftest import BASE_MODEL, run_services
from tests.coordinator.http.tinker.test_sampling import sample
from tests.support.otel_collector import collecting, values

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def collector(monkeypatch):
    with collecting() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.endpoint)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=node-a,team=red%20blue")
        yield found


async def test_a_request_is_a_span_in_the_trace_of_its_client_and_metrics_are_sent(collector, tmp_path):
    def sampled() -> float:
        return REGISTRY.get_sample_value("spmd_tx_requests_total", {"kind": "sample", "error": ""}) or 0.0

    before = sampled()
    show_group(MAIN)  # as a server does when it opens its groups
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
    names = values(collector.resources[0].resource.attributes)
    assert names["service.name"] == "spmd_tx"
    assert names["service.version"] == version("spmd_tx")
    assert (names["service.instance.id"], names["team"]) == ("node-a", "red blue")
    spans = collector.spans
    ours = [span for span in spans if span.trace_id.hex() == TRACE]
    (request,) = [span for span in ours if span.name == "sample"]
    assert request.parent_span_id.hex() == PARENT
    assert values(request.attributes)["spmd_tx.seq_id"] == 0
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
    units = {metric.name: metric.unit for metric in collector.metrics}
    assert units.items() >= {
        ("spmd_tx_unfinished_requests", ""),
        ("spmd_tx_snapshot_seconds_sum", "s"),
        ("spmd_tx_snapshot_seconds_count", ""),
    }
    assert "By" in units.values()


def timed(id, trace=None):
    request = Request(1, id, "forward_backward", "model", 0, "session")
    return Timed(request, RequestTimes(accepted_at=1.0, trace=trace), finished_at=2.0)


@pytest.fixture
def exported():
    """Telemetry that follows the choice of clients and drops the rest, and the spans of requests."""

    def requests():
        return [span for span in spans.get_finished_spans() if span.kind is SpanKind.SERVER]

    def telemetry(sampler=ALWAYS_ON):
        provider = TracerProvider(sampler)
        provider.add_span_processor(SimpleSpanProcessor(spans))
        return Telemetry(provider, None), requests

    spans = InMemorySpanExporter()
    return telemetry


def test_a_failure_says_whose_fault_it_is(exported):
    telemetry, requests = exported()
    telemetry.ended(timed("id"), Failed("token 7 is unknown", "user"))
    (span,) = requests()
    assert span.parent is None
    assert span.attributes["error.type"] == "user"
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "token 7 is unknown")


@pytest.mark.parametrize(
    ("trace", "parent"), [(None, None), ("nonsense", None), (f"00-{TRACE}-{PARENT}-01", PARENT)]
)
def test_workers_are_told_the_span_that_a_request_will_be(exported, trace, parent):
    telemetry, requests = exported()
    told = telemetry.contexts([timed("one", trace), timed("two")])
    assert telemetry.contexts([timed("one", trace)]) == told[:1]
    telemetry.ended(timed("one", trace), None)
    telemetry.ended(timed("two"), None)
    ids = [span.context for span in requests()]
    assert told == tuple(f"00-{each.trace_id:032x}-{each.span_id:016x}-01" for each in ids)
    (one, two) = requests()
    assert (one.parent and f"{one.parent.span_id:016x}", two.parent) == (parent, None)
    again, _ = exported()  # as after a restart
    assert again.contexts([timed("one", trace)]) == told[:1]


@pytest.mark.parametrize(("flags", "count"), [("00", 0), ("01", 1)])
def test_requests_that_are_not_sampled_are_nothing_to_workers(exported, flags, count):
    telemetry, requests = exported(ParentBased(ALWAYS_OFF))
    both = [timed("one"), timed("two", f"00-{TRACE}-{PARENT}-{flags}")]
    assert len(telemetry.contexts(both)) == count
    for each in both:
        telemetry.ended(each, None)
    assert len(requests()) == count


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
