import pytest

from spmd_tx.coordinator.requests.records import Request, RequestTimes
from spmd_tx.coordinator.requests.runs import recent
from spmd_tx.coordinator.requests.runs.recent import RecentWork, Timed
from spmd_tx.coordinator.requests.runs.time_shares import CAUSES, segments, slices

REQUEST = Request(1, "r1", "forward_backward", "s:train:0", 1, "s")


def timed(*, finished=None, compiled=(), since=None, **times):
    return Timed(REQUEST, RequestTimes(**times, compiled=compiled, compiling_since=since), finished, 7)


def shown(request, now=100.0):
    return [tuple(segment) for segment in segments(request, now)]


def shares(requests, *, window=(100.0, 110.0), outages=(), own=0.0, others=0.0):
    """The seconds of causes that took any, when devices worked so long in each slice of 5 s."""
    stages = [segment for request in requests for segment in segments(request, window[1])]
    found = slices(stages, outages, window, 5.0, lambda at: (own, others))
    assert sum(sum(each.seconds.values()) for each in found) == pytest.approx(window[1] - window[0])
    seconds = {cause: sum(each.seconds[cause] for each in found) for cause in CAUSES}
    return {cause: pytest.approx(each) for cause, each in seconds.items() if each > 1e-9}


def test_a_finished_request_has_all_stages():
    request = timed(accepted_at=1.0, began_at=2.0, sent_at=3.0, replied_at=6.0, finished=7.0)
    assert shown(request) == [
        ("queued", 1.0, 2.0),
        ("batched", 2.0, 3.0),
        ("device", 3.0, 6.0),
        ("encoded", 6.0, 7.0),
    ]


@pytest.mark.parametrize(
    "times, expected",
    [
        ({}, [("queued", 1.0, 9.0)]),
        ({"began_at": 2.0}, [("queued", 1.0, 2.0), ("batched", 2.0, 9.0)]),
        (
            {"began_at": 2.0, "sent_at": 3.0, "replied_at": 4.0},  # more commands will follow
            [("queued", 1.0, 2.0), ("batched", 2.0, 3.0), ("device", 3.0, 9.0)],
        ),
        (
            {"began_at": 2.0, "since": 4.0},
            [("queued", 1.0, 2.0), ("batched", 2.0, 4.0), ("compiling", 4.0, 9.0)],
        ),
    ],
)
def test_an_unfinished_request_is_in_its_last_stage(times, expected):
    assert shown(timed(accepted_at=1.0, **times), now=9.0) == expected


def test_waits_for_programs_are_cut_out_of_any_stage():
    request = timed(
        accepted_at=1.0,
        began_at=1.0,
        sent_at=5.0,
        replied_at=9.0,
        finished=9.0,
        compiled=((2.0, 4.0), (6.0, 7.0)),
    )
    assert shown(request) == [
        ("batched", 1.0, 2.0),
        ("compiling", 2.0, 4.0),
        ("batched", 4.0, 5.0),
        ("device", 5.0, 6.0),
        ("compiling", 6.0, 7.0),
        ("device", 7.0, 9.0),
    ]


def on_device(begin, end):
    return timed(accepted_at=begin, began_at=begin, sent_at=begin, replied_at=end, finished=end)


def test_time_without_requests_is_the_clients():
    assert shares([]) == {"client": 10.0}
    assert shares([on_device(101.0, 103.0)], own=5.0) == {"device": 2.0, "client": 8.0}


def test_of_the_time_on_devices_only_that_of_own_commands_is_the_runs():
    found = shares([on_device(90.0, 120.0)], own=2.0, others=2.5)
    assert found == {"device": 4.0, "queue": 5.0, "server": 1.0}


def test_a_wait_is_the_queues_only_while_devices_work_for_others():
    waiting = timed(accepted_at=100.0, began_at=100.0)
    assert shares([waiting], others=5.0) == {"queue": 10.0}
    assert shares([waiting]) == {"server": 10.0}


def test_the_furthest_request_decides():
    compiling = timed(accepted_at=100.0, began_at=100.0, since=100.0)
    assert shares([compiling, on_device(100.0, 104.0)], own=5.0) == {"device": 4.0, "compile": 6.0}
    stored = timed(accepted_at=90.0, began_at=90.0, sent_at=90.0, replied_at=100.0, finished=106.0)
    assert shares([stored]) == {"server": 6.0, "client": 4.0}


def test_without_workers_only_requests_wait():
    waiting = timed(accepted_at=100.0, began_at=100.0, sent_at=101.0)
    found = shares([waiting], outages=[(102.0, 107.0)], own=5.0)
    assert found == {"device": 4.0, "restart": 5.0, "server": 1.0}
    assert shares([], outages=[(100.0, 110.0)]) == {"client": 10.0}


def test_slices_begin_at_multiples_of_their_length():
    found = slices([], [], (103.0, 111.0), 5.0, lambda at: (0.0, 0.0))
    assert [(each.at, each.seconds["client"]) for each in found] == [(103.0, 2.0), (105.0, 5.0), (110.0, 1.0)]


def test_the_seconds_of_a_command_are_in_the_slices_in_which_it_ran(monkeypatch):
    monkeypatch.setattr(recent.clock, "now", lambda: 112.0)
    work = RecentWork()
    work.worked({("s", "m"), ("t", "n")}, 9.0)
    work.worked({("t", "n")}, 1.0, "teacher")
    work.worked((), 2.0)  # of no request
    assert [work.devices(at).total for at in (99.0, 100.0, 107.0, 112.0)] == [0.0, 2.0, 5.0, 3.0]
    assert work.devices(112.0).by_line == {("s", "m"): 2.0, ("t", "n"): 3.0}
    assert work.devices(112.0).by_group == {"main": 2.0, "teacher": 1.0}


def test_what_is_old_or_too_much_is_forgotten(monkeypatch):
    monkeypatch.setattr(recent, "MOST_REQUESTS", 3)
    now = recent.clock.now()
    monkeypatch.setattr(recent.clock, "now", lambda: now)
    work = RecentWork()
    for second in range(5):
        work.ended(Timed(REQUEST, RequestTimes(), now + second, tokens=1))
    assert [each.finished_at - now for each in work.ended_since(now + 3)] == [3, 4]
    assert len(work.ended_since(0.0)) == 3
    assert work.known_since == now + 1  # the last one that is forgotten
    work.ended(Timed(REQUEST, RequestTimes(), now + recent.KEPT_SECONDS + 3.5, tokens=1))
    assert [each.finished_at - now for each in work.ended_since(0.0)] == [4, recent.KEPT_SECONDS + 3.5]
    work.worked({("s", "m")}, 100 * recent.KEPT_SECONDS)
    assert len(work._slices) == recent.KEPT_SECONDS / recent.SLICE_SECONDS
