import pytest

from spmd_tx.coordinator.runtime import mesh_record
from spmd_tx.coordinator.runtime.mesh_record import MeshTimeline
from spmd_tx.protocol.memory_plan import MemoryPlan

PLAN = MemoryPlan(pages=8, train_tokens=64, decode_rows=4)


@pytest.fixture
def at(monkeypatch):
    """Set the time."""
    return lambda now: monkeypatch.setattr(mesh_record.clock, "now", lambda: now)


def test_an_outage_lasts_until_the_next_workers_are_ready(at):
    record = MeshTimeline()
    assert record.outages(until=50.0) == []
    at(10.0)
    record.began(1, {"fsdp": 8}, ["node-a"])
    assert record.outages(until=12.0) == [(10.0, 12.0)]
    at(15.0)
    record.ready("8 x cpu", PLAN)
    assert record.outages(until=20.0) == [(10.0, 15.0)]
    at(30.0)
    record.lost("worker 0 was killed")
    at(31.0)
    record.began(2, {"fsdp": 8}, ["node-b"])
    at(32.0)
    record.lost("worker 0 was killed again")  # before it was ready
    record.began(3, {"fsdp": 8}, ["node-b"])
    assert record.outages(until=40.0) == [(10.0, 15.0), (30.0, 40.0)]
    assert [each.reason for each in record.generations] == [
        "worker 0 was killed",
        "worker 0 was killed again",
        None,
    ]
    assert (record.mesh, record.hosts) == ({"fsdp": 8}, ["node-b"])
    assert (record.device, record.plan) == ("8 x cpu", PLAN)
