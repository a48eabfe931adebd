import asyncio
import json
from itertools import pairwise

from spmd_tx.coordinator.requests import traces
from spmd_tx.coordinator.requests.traces import STAGES, TracedRequest, events, write
from spmd_tx.coordinator.storage.tables import SessionRow


def request(number, begin, end, line="m", kind="sample", **more):
    """Times in seconds; unless told otherwise, every stage takes a quarter."""
    quarter = ((end or begin) - begin) / 4
    values = {
        "began_at": begin + quarter,
        "sent_at": begin + 2 * quarter,
        "replied_at": begin + 3 * quarter,
        "tokens": 7,
        "category": None,
        **more,
    }
    return TracedRequest(number, kind, line, number, begin, finished_at=end, **values)


def slices(requests, now=1000.0):
    return [event for event in events(requests, now) if event["ph"] == "X"]


def of_name(found, name):
    return [event for event in found if event["name"] == name]


def test_a_request_is_a_slice_with_its_stages_in_it():
    whole, *stages = slices([request(3, 100.0, 108.0, kind="optim_step")])
    assert (whole["name"], whole["ts"], whole["dur"]) == ("optim_step 3", 100_000_000, 8_000_000)
    assert whole["args"] == {"seq_id": 3, "number": 3, "tokens": 7}
    assert [stage["name"] for stage in stages] == list(STAGES)
    assert [stage["ts"] for stage in stages] == [100_000_000, 102_000_000, 104_000_000, 106_000_000]
    assert {stage["dur"] for stage in stages} == {2_000_000}


def test_slices_of_one_lane_never_overlap_and_lanes_are_used_again():
    requests = [request(n, begin=100 + n, end=100 + n + [1.5, 4.5, 0.2][n % 3]) for n in range(50)]
    open_at_arrival = [
        sum(each.created_at <= one.created_at < each.finished_at for each in requests) for one in requests
    ]
    lanes = {}
    for event in slices(requests):
        if event["name"] not in STAGES:
            lanes.setdefault(event["tid"], []).append(event)
    assert len(lanes) == max(open_at_arrival) > 1
    for lane in lanes.values():
        assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in pairwise(lane))


def test_every_model_and_sampler_has_a_track_of_its_own():
    found = list(events([request(1, 1.0, 2.0, "s:train:0"), request(2, 1.0, 2.0, "s:sample:0")], 3.0))
    names = {event["args"]["name"]: event["pid"] for event in of_name(found, "process_name")}
    assert names.keys() == {"s:train:0", "s:sample:0"}
    assert len(set(names.values())) == 2
    assert all(event["pid"] in names.values() for event in found)


def test_what_failed_in_the_line_was_queued_to_its_end():
    nowhere = {"began_at": None, "sent_at": None, "replied_at": None}
    whole, queued = slices([request(1, 1.0, 3.0, **nowhere, category="user")])
    assert whole["args"]["failed"] == "user"
    assert (queued["name"], queued["dur"]) == ("queued", 2_000_000)


def test_what_is_unfinished_lasts_until_now():
    (whole,) = slices([request(1, 10.0, None)], now=12.0)
    assert whole["dur"] == 2_000_000
    assert whole["args"]["unfinished"] is True


def test_times_that_run_backwards_do_not_break_the_nesting():
    whole, *stages = slices([request(1, 10.0, 11.0, began_at=9.0, sent_at=12.0, replied_at=10.5)])
    assert all(stage["ts"] >= whole["ts"] for stage in stages)
    assert sum(stage["dur"] for stage in stages) == whole["dur"]


def test_the_file_is_json_with_all_events():
    requests = [request(1, 1.0, 2.0), request(2, 1.5, 3.0)]
    trace = json.loads(b"".join(write(requests, 4.0, {"session_id": "s"})))
    assert trace["otherData"] == {"session_id": "s"}
    assert trace["traceEvents"] == list(events(requests, 4.0))


def test_an_empty_trace_is_a_trace():
    assert json.loads(b"".join(write([], 4.0, {})))["traceEvents"] == []


async def test_traces_are_built_one_at_a_time_for_each_owner(database, tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "PATIENCE_SECONDS", 0.01)
    exports, owners = traces.TraceExports(database, tmp_path), {"a1": "alice", "a2": "alice", "b": "bob"}
    sessions = {id: SessionRow(id=id, owner=owner) for id, owner in owners.items()}
    may_go_on, building = asyncio.Event(), set()

    async def requests(session_id):
        building.add(session_id)
        await may_go_on.wait()
        return []

    monkeypatch.setattr(exports, "_requests", requests)
    for id in ("a1", "a2", "b", "a1"):
        assert await exports.export(sessions[id]) == traces.Export()
    assert building == {"a1", "b"}
    may_go_on.set()
    async with asyncio.timeout(60):
        for id in sessions:
            while (await exports.export(sessions[id])).path is None:
                await asyncio.sleep(0.01)
    assert building == sessions.keys()
