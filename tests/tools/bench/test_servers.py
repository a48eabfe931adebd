"""What benchmarks read of a server's metrics, from the metrics themselves."""

import pytest

from spmd_tx.coordinator.runtime import metrics
from tools.bench.servers import total


def test_a_metric_is_summed_over_all_groups() -> None:
    for group, count in (("one", 3), ("two", 4)):
        metrics.PROGRAMS_PLANNED.labels(group).set(count)
    text = metrics.exposition().decode()
    try:
        assert total(text, "spmd_tx_programs_planned") == 7
    finally:
        metrics.PROGRAMS_PLANNED.clear()
    with pytest.raises(KeyError, match="spmd_tx_no_such_metric"):
        total(text, "spmd_tx_no_such_metric")
