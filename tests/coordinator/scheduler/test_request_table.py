"""The one record of each request: what becomes of it as workers come and go, and who is kept apart."""

import pytest

from spmd_tx.coordinator.requests.quarantine import Quarantine
from spmd_tx.coordinator.requests.records import Request
from spmd_tx.coordinator.scheduler.planned_for import PlannedFor, apart, isolate, together
from spmd_tx.coordinator.scheduler.request_table import Danger, RequestStatus, RequestTable
from spmd_tx.coordinator.training.model import CommandStep, TrainedModel
from tests.coordinator.scheduler.table_integrity import check_integrity

A, B = "alice:train:0", "bob:train:0"


def request(number, line=A, kind="optim_step"):
    return Request(number, f"request-{number}", kind, line, number, line.split(":")[0])


@pytest.fixture
def table():
    table = RequestTable(Quarantine(), [request(0), request(1), request(2, B)])
    yield table
    check_integrity(table)


def status_of(table, number):
    state = table.get(f"request-{number}")
    return None if state is None else state.status


def test_what_has_begun_waits_again_once_the_workers_are_lost(table):
    table.get("request-1").status = RequestStatus.BEGUN
    table.end_generation()
    assert status_of(table, 1) is RequestStatus.WAITING


def test_a_request_that_was_given_up_stays_for_its_line_while_the_workers_live(table):
    table.suspect(["request-1"])
    table.give_up(table.get("request-1"), "it hangs")
    check_integrity(table)
    assert [each.id for each in table.unfinished()] == ["request-0", "request-2"]
    assert table.find_unfinished("request-1") is None
    assert status_of(table, 1) is RequestStatus.GIVEN_UP
    assert not table.has_suspects
    table.end_generation()
    assert status_of(table, 1) is None


def test_references_to_a_request_tell_that_it_has_ended(table):
    state = table.get("request-1")
    table.remove("request-1")
    table.remove("request-1")
    assert state.status is RequestStatus.ENDED


def test_a_session_is_over_when_it_has_ended_and_its_work_is_done(table):
    table.end_session("alice")
    assert table.has_ended("alice")
    assert table.works_for("alice")
    table.remove("request-0")
    table.give_up(table.get("request-1"), "it hangs")
    assert table.has_ended("alice")
    assert not table.works_for("alice")
    assert not table.has_ended("bob")
    table.forget_session("alice")
    assert [status_of(table, number) for number in range(3)] == [None, None, RequestStatus.WAITING]


def test_only_requests_with_something_left_to_do_are_suspects(table):
    table.remove("request-0")
    table.suspect(["request-0", "unknown"])
    assert not table.has_suspects
    table.suspect(["request-1"])
    assert table.has_suspects
    table.remove("request-1")
    assert not table.has_suspects


def test_suspicion_outlives_the_workers_and_ends_when_the_request_has_run_again(table):
    old = request(9, B)
    table.start_generation([old])
    assert status_of(table, 9) is RequestStatus.AGAIN
    table.end_generation()
    table.suspect([old.id])
    table.start_generation([old])
    assert table.has_suspects
    table.remove(old.id)
    assert not table.has_suspects
    table.start_generation([old])
    table.start_generation([])  # its session has ended
    assert status_of(table, 9) is None


def test_requests_that_may_end_the_process_are_watched_also_when_they_run_again():
    table = RequestTable(Quarantine(ends={"request-0": 1, "request-9": 1}), [request(0), request(1)])
    table.start_generation([request(9, B)])
    check_integrity(table)
    ids = {state.request.id for state in table.in_danger_of(Danger.SERVER)}
    assert ids == {"request-0", "request-9"}


def test_loneliness_ends_with_the_workers(table):
    table.isolate(table.get("request-1"))
    assert table.get("request-1").is_lonely
    table.end_generation()
    assert not table.get("request-1").is_lonely


def model_before(request_id, model_id=A):
    model = TrainedModel(model_id, "alice", "local", on_step=lambda: None)
    model.unsent.append(CommandStep(request_id, list))
    return model


async def test_those_planned_for_are_lonely_after_an_error_whoever_they_work_for(table):
    of_request, of_server, other = model_before("request-0"), model_before("", B), model_before("")
    planned_for = PlannedFor((of_request, of_server), frozenset({"request-2"}))
    assert isolate(planned_for, table)
    assert not isolate(planned_for, table)
    assert apart([of_request, of_server, other], table) == [[other], [of_request], [of_server]]
    assert together([of_request, of_server, other], ["request-2"], table) == PlannedFor((other,))
    of_request.unsent[0] = CommandStep("request-1", list)  # the lonely request has had its turn
    assert apart([of_request, of_server, other], table) == [[of_request, other], [of_server]]


async def test_if_all_are_lonely_the_first_is_planned_for(table):
    for number in (1, 2):
        table.isolate(table.get(f"request-{number}"))
    first = PlannedFor(samples=frozenset({"request-2"}))
    assert together([], ["request-2", "request-1"], table) == first
    model = model_before("request-1")
    assert together([model], ["request-2"], table) == PlannedFor((model,))
