import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from spmd_tx.protocol.envelope import Envelope
from spmd_tx.worker import command_spans
from spmd_tx.worker.command_spans import CommandSpans, open_command_spans
from tests.worker.test_loop import DECODE, OPTIM_STEP

ONE, TWO = (f"00-4bf92f3577b34da6a3ce929d0e0e4736-{number:016x}-01" for number in (1, 2))


@pytest.fixture
def spans(monkeypatch):
    monkeypatch.setattr(time, "time_ns", lambda: round(clock[0] * 1e9))
    monkeypatch.setattr(command_spans, "GAP", 10**9)
    clock = [100.0]
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Spans(CommandSpans(provider, {"spmd_tx.process": 3}), exporter, clock)


class Spans:
    def __init__(self, own, exporter, clock):
        self.own, self.exporter, self.clock = own, exporter, clock
        self.sequence = 0

    def begin(self, at, *contexts, command=DECODE):
        self.clock[0] = 100 + at
        self.own.begun(Envelope(generation=1, sequence=self.sequence, command=command, contexts=contexts))
        self.sequence += 1
        return self.sequence - 1

    def end(self, at, sequence):
        self.clock[0] = 100 + at
        self.own.ended(sequence)

    def run(self, begin, end, *contexts, command=DECODE):
        self.end(end, self.begin(begin, *contexts, command=command))

    def found(self):
        """Request, name, begin, end, commands and busy seconds of each span."""
        return [
            (
                span.parent.span_id,
                span.name,
                span.start_time / 1e9 - 100,
                span.end_time / 1e9 - 100,
                span.attributes["spmd_tx.commands"],
                pytest.approx(span.attributes["spmd_tx.busy_seconds"]),
            )
            for span in self.exporter.get_finished_spans()
        ]


def test_commands_that_follow_each_other_are_one_span_for_each_request(spans):
    with spans.own:
        spans.run(0, 1, ONE)
        spans.run(1.5, 2, ONE, TWO)
        spans.run(2, 4, TWO)
        spans.run(4, 5, TWO, command=OPTIM_STEP)
        spans.run(5, 6)
    assert spans.found() == [
        (2, "decode", 1.5, 4.0, 2, 2.5),
        (1, "decode", 0.0, 2.0, 2, 1.5),
        (2, "optim_step", 4.0, 5.0, 1, 1.0),
    ]
    assert {span.attributes["spmd_tx.process"] for span in spans.exporter.get_finished_spans()} == {3}


def test_a_command_begins_when_the_one_before_it_has_ended(spans):
    with spans.own:
        first, second = spans.begin(0, ONE), spans.begin(0.25, TWO)
        spans.end(2, first)
        spans.end(3, second)
    assert spans.found() == [(1, "decode", 0.0, 2.0, 1, 2.0), (2, "decode", 2.0, 3.0, 1, 1.0)]


def test_a_pause_ends_a_span(spans):
    with spans.own:
        spans.run(0, 1, ONE)
        spans.run(2, 3, ONE)
    assert spans.found() == [(1, "decode", 0.0, 1.0, 1, 1.0), (1, "decode", 2.0, 3.0, 1, 1.0)]


def test_a_span_is_sent_while_no_further_command_comes(spans, monkeypatch):
    monkeypatch.setattr(command_spans, "GAP", 10**7)
    with spans.own:
        spans.run(0, 1, ONE)
        spans.clock[0] += 1
        deadline = time.monotonic() + 60
        while not spans.found():
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_a_failure_does_not_wait_for_a_collector(spans):
    def work():
        with spans.own:
            spans.run(0, 1, ONE)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert spans.found() == []


def test_an_error_in_reporting_is_logged_and_the_worker_goes_on(spans, monkeypatch, caplog):
    monkeypatch.setattr(spans.own._tracer, "start_span", lambda *_, **__: 1 / 0)
    with spans.own:
        spans.run(0, 1, ONE)
        spans.run(1, 2, ONE, command=OPTIM_STEP)
    assert "ZeroDivisionError" in caplog.text


def test_without_a_collector_nothing_is_noted():
    assert open_command_spans({}, process=0, generation=1) is None
