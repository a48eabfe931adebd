"""What the workers have compiled, as process 0 tells it: for health checks and for Prometheus."""

import logging

import msgspec

from spmd_tx.coordinator import metrics
from spmd_tx.programs_protocol import CompileReport

logger = logging.getLogger(__name__)


class ProgramsHealth(msgspec.Struct, frozen=True, omit_defaults=True):
    """How far the warm-up is."""

    ready: int
    planned: int
    compiling: str | None = None  # "forward_backward 4x256"


class CompileProgress:
    """Of one generation of workers after the other."""

    def __init__(self) -> None:
        self._set(CompileReport())

    def begin(self) -> None:
        """New workers, which have compiled nothing."""
        self._set(CompileReport())

    def take(self, report: CompileReport) -> None:
        """The next report of the same workers; what it counts is since they started."""
        before = {(each.program, each.is_cached): each for each in self._last.counts}
        for each in report.counts:
            last = before.get((each.program, each.is_cached))
            labels = each.program, "cache" if each.is_cached else "compiler"
            metrics.COMPILES.labels(*labels).inc(each.count - (last.count if last else 0))
            metrics.COMPILE_SECONDS.labels(*labels).inc(each.seconds - (last.seconds if last else 0.0))
        is_news = report.planned and self._last.ready < report.planned == report.ready
        self._set(report)
        if is_news:
            logger.info("all %d programs are ready: no request has to wait for one", report.planned)

    @property
    def health(self) -> ProgramsHealth | None:
        """None without a warm-up."""
        last = self._last
        return ProgramsHealth(last.ready, last.planned, last.ahead or None) if last.planned else None

    def _set(self, report: CompileReport) -> None:
        self._last = report
        metrics.PROGRAMS_PLANNED.set(report.planned)
        metrics.PROGRAMS_READY.set(report.ready)
