"""Adds outcomes of requests to the Prometheus metrics."""

from functools import cache

from prometheus_client import Counter, Histogram

from spmd_tx.coordinator.requests.records import Failed, Finished, Outcome, RequestKind
from spmd_tx.coordinator.runtime import metrics

_TOKENS = {use: metrics.TOKENS.labels(use) for use in ("trained", "forwarded", "prompt", "cached", "sampled")}


def count(kind: RequestKind, outcome: Outcome, seconds: float) -> None:
    """Count an outcome, the seconds until it was durable, and the tokens of a result."""
    ended, times = _children(kind, outcome.category if isinstance(outcome, Failed) else "")
    ended.inc()
    times.observe(seconds)
    if isinstance(outcome, Finished):
        for use, counter in _TOKENS.items():
            if tokens := getattr(outcome.spent, use):
                counter.inc(tokens)


@cache  # looking labels up takes longer than counting
def _children(kind: RequestKind, error: str) -> tuple[Counter, Histogram]:
    return metrics.REQUESTS.labels(kind, error), metrics.REQUEST_SECONDS.labels(kind)
