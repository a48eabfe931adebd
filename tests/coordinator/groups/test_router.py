from types import SimpleNamespace

import pytest

from spmd_tx.coordinator.bases.bases import Bases
from spmd_tx.coordinator.bases.served_base import BaseHistory
from spmd_tx.coordinator.catalog.served_names import ServedNames
from spmd_tx.coordinator.groups.of_base import GroupsOfBase
from spmd_tx.coordinator.groups.router import Router
from spmd_tx.coordinator.requests.records import Request
from spmd_tx.errors import Unavailable


class FakeScheduler:
    def __init__(self):
        self.arrived = []
        self.cancelled = []
        self.retired = []

    def arrive(self, request, tokens=0):
        self.arrived.append(request.id)

    def draws_from(self, sampler):
        return False

    def holds(self, request_id):
        return request_id in self.arrived

    def status(self, request_id):
        return f"status of {request_id}"

    def cancel(self, request_id):
        self.cancelled.append(request_id)

    def retire(self, samplers):
        self.retired.extend(samplers)

    def give_up(self, request_id, why):
        return True

    @property
    def has_unfinished(self):
        return bool(self.arrived)


class FakeLog:
    def __init__(self, *unfinished):
        self._unfinished = unfinished
        self.outcomes = {}

    def unfinished(self):
        return list(self._unfinished)

    def resolve(self, request_id, outcome):
        self.outcomes[request_id] = outcome


def base(key):
    return SimpleNamespace(
        key=key, name=key, names=ServedNames((key,), 64), history=BaseHistory(key, (key,)), is_trainable=True
    )


def request(id, base=None, kind="sample"):
    return Request(1, id, kind, "a line", 0, "a session", base)


KNOWN = [BaseHistory("student", ("student",)), BaseHistory("gone", ("gone", "its later name"))]
STRANDED = request("stranded", "gone")


@pytest.fixture
def groups():
    return [SimpleNamespace(base=base(key), scheduler=FakeScheduler()) for key in ("student", "teacher")]


@pytest.fixture
def bases(groups):
    return Bases([group.base for group in groups], KNOWN)


@pytest.fixture
def log():
    return FakeLog(STRANDED)


@pytest.fixture
def router(log, bases, groups):
    return Router(log, bases, of_bases(groups))


def of_bases(groups):
    return {group.base.key: alone(group) for group in groups}


def alone(group):
    group.beside = GroupsOfBase(None, [("main", True)], None, None)
    group.beside.add(group)
    return group.beside


def arrived(groups):
    return [group.scheduler.arrived for group in groups]


def test_a_request_goes_to_the_group_of_its_base(router, groups):
    router.arrive(request("1", "teacher"))
    router.arrive(request("2", "student"))
    assert arrived(groups) == [["2"], ["1"]]
    assert router.status("1") == "status of 1"


def test_a_sample_is_told_from_other_requests_by_the_group_that_has_it(log, bases):
    beside = GroupsOfBase(log, [("main", True), ("rollouts", False)], None, None)
    members = [
        SimpleNamespace(name=name, trains=name == "main", is_ready=False, scheduler=FakeScheduler())
        for name in ("main", "rollouts")
    ]
    for member in members:
        beside.add(member)
    router = Router(log, bases, {"student": beside})
    members[0].scheduler.arrive(request("1", "student"))
    found = {
        id: router.group_of(request(id, "student", kind))
        for id, kind in (("1", "sample"), ("2", "sample"), ("3", "forward"))
    }
    assert found == {"1": "main", "2": "rollouts", "3": "main"}
    assert router.group_of(STRANDED) is None


def test_a_request_from_before_there_were_several_bases_is_the_first_ones(router, groups):
    router.arrive(request("1"))
    assert arrived(groups) == [["1"], []]


def test_a_custom_loss_needs_no_base_and_does_not_wait_for_one(log, groups):
    router = Router(log, Bases([groups[1].base], KNOWN), of_bases(groups[1:]))
    router.arrive(request("1", kind="create_custom_loss"))
    assert arrived(groups) == [[], ["1"]]


def test_work_on_a_base_that_is_not_served_waits_and_says_why(router, groups, log):
    router.arrive(request("1", "gone"))
    for waiting in ("stranded", "1"):
        status = router.status(waiting)
        assert status.queue_state == "paused_capacity"
        assert "gone is not served now" in status.reason
    assert arrived(groups) == [[], []]
    assert not router.has_unfinished, "the server can end: nothing of this will be done"
    assert log.outcomes == {}


def test_a_base_that_could_not_be_read_says_why_and_is_served_when_it_can_be(router, groups, bases):
    bases.reasons["gone"] = lambda: "group late has failed: no such folder"
    assert (
        "group late has failed: no such folder; what is unfinished waits" in router.status("stranded").reason
    )
    with pytest.raises(Unavailable, match="its later name is not served now: group late has failed"):
        bases.need("its later name")

    late = SimpleNamespace(base=base("gone"), scheduler=FakeScheduler())
    alone(late)
    bases.add(late.base)
    router.add(late)
    assert bases.need("gone").base is late.base
    assert router.status("stranded").queue_state == "active", "its scheduler has it from the log"
    router.arrive(request("1", "gone"))
    assert (arrived(groups), late.scheduler.arrived) == ([[], []], ["1"])


def test_versions_are_retired_by_the_group_that_may_use_their_folders(router, groups):
    router.retire({"s1": "student", "s2": "teacher", "s3": "gone"})
    assert [group.scheduler.retired for group in groups] == [["s1"], ["s2"]]


def test_a_sample_on_a_base_that_is_not_served_can_be_cancelled(router, log):
    router.cancel("stranded")
    assert log.outcomes["stranded"].category == "user"
    assert router.status("stranded").queue_state == "active"


def test_the_operator_can_give_up_what_waits_for_a_base(router, log):
    assert router.give_up("stranded", "it never comes back")
    assert "it never comes back" in log.outcomes["stranded"].error


def test_all_names_of_a_base_that_is_not_served_are_refused_with_the_reason(bases):
    for name in ("gone", "its later name", "its later name:peft:32"):
        with pytest.raises(Unavailable, match="is not served now"):
            bases.need(name)
        with pytest.raises(Unavailable, match="is not served now"):
            bases.of_row(name)
    assert bases.of_row("teacher").key == "teacher"
    assert bases.of_row("a name from before names were recorded").key == "student"
