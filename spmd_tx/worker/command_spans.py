"""Reports commands as OpenTelemetry's spans, in the traces of the requests that they are for."""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spmd_tx.open_telemetry import VERSION, open_traces, shut_down
from spmd_tx.protocol.envelope import Envelope

logger = logging.getLogger(__name__)

GAP = 1_000_000_000  # nanoseconds between commands of one span; a request is sampled by hundreds of them
FLUSH_SECONDS = 2.0  # at the end, for a collector that does not answer


@dataclass
class _Open:
    """Holds a span that may go on. Times are nanoseconds since the epoch."""

    name: str
    begin: int
    end: int = 0
    commands: int = 0
    busy: int = 0  # nanoseconds

    def goes_on_with(self, name: str, begin: int) -> bool:
        """Return whether a command that begins then belongs to the span."""
        return name == self.name and begin < self.end + GAP

    def add(self, begin: int, end: int) -> None:
        """Take in a command."""
        self.end = end
        self.commands += 1
        self.busy += end - begin


class CommandSpans:
    """Makes one span of commands of a kind that follow each other for a request.

    Commands are executed one after the other: each begins where the one before ends, or when it arrives.
    """

    def __init__(self, provider: Any, attributes: Mapping[str, int]) -> None:
        """``provider`` is a TracerProvider; ``attributes`` are those of every span."""
        self._provider = provider
        self._tracer = provider.get_tracer("spmd_tx", VERSION)
        self._attributes = dict(attributes)
        self._begun: dict[int, tuple[Envelope, int]] = {}  # by sequence
        self._free_at = 0  # when the last command ended
        self._open: dict[str, _Open] = {}  # by context
        self._lock = threading.Lock()  # of _open
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="command spans", daemon=True)

    def __enter__(self) -> "CommandSpans":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_ending.set()
        if kind is None:  # else the failure is reported first, and ends the process
            self._thread.join()
            self._close_before(None)
            shut_down([self._provider], FLUSH_SECONDS)

    def begun(self, envelope: Envelope) -> None:
        """Note that a command is about to be executed."""
        self._begun[envelope.sequence] = envelope, time.time_ns()

    def ended(self, sequence: int) -> None:
        """Note that the result of a command is there."""
        envelope, begin = self._begun.pop(sequence)
        begin, end = max(begin, self._free_at), time.time_ns()
        self._free_at = end
        name = envelope.command.name
        with self._lock:
            for context in envelope.contexts:
                span = self._open.get(context)
                if span is not None and not span.goes_on_with(name, begin):
                    self._report(context, span)
                    span = None
                if span is None:
                    span = self._open[context] = _Open(name, begin)
                span.add(begin, end)

    def _run(self) -> None:
        while not self._is_ending.wait(GAP / 1e9):
            self._close_before(time.time_ns() - GAP)

    def _close_before(self, moment: int | None) -> None:
        """Report the spans that ended before a moment; None: all."""
        with self._lock:
            over = [each for each, span in self._open.items() if moment is None or span.end < moment]
            for context in over:
                self._report(context, self._open.pop(context))

    def _report(self, context: str, span: _Open) -> None:
        from opentelemetry import propagate
        from opentelemetry.context import Context

        amounts = {"spmd_tx.commands": span.commands, "spmd_tx.busy_seconds": span.busy / 1e9}
        try:
            exported = self._tracer.start_span(
                span.name,
                context=propagate.extract({"traceparent": context}, Context()),
                attributes=self._attributes | amounts,
                start_time=span.begin,
            )
            exported.end(span.end)
        except Exception:  # whatever it is, commands go on
            logger.warning("a span of %s was not reported", span.name, exc_info=True)


def open_command_spans(environment: Mapping[str, str], process: int, generation: int) -> CommandSpans | None:
    """Return where commands are reported to; None if no collector of traces is named.

    Raises StartError as open_traces does.
    """
    provider = open_traces(environment)
    if provider is None:
        return None
    return CommandSpans(provider, {"spmd_tx.process": process, "spmd_tx.generation": generation})
