"""A process of tests that crashes costs one test: the others are run by the process that follows it."""

from types import SimpleNamespace
from typing import Any

from tests.support.distribution import pytest_xdist_make_scheduler

TESTS = ["tests/a.py::test_1", *(f"tests/b.py::test_{number}" for number in (1, 2, 3))]


class Process:
    """What a scheduler knows of a process of tests."""

    def __init__(self) -> None:
        self.told: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, numbers: list[int]) -> None:
        self.told += numbers

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduling() -> Any:
    options = {"dist": "loadfile", "tx": ["popen"]}
    option = SimpleNamespace(loadscopereorder=False)
    config: Any = SimpleNamespace(getvalue=options.__getitem__, option=option)
    return pytest_xdist_make_scheduler(config, None)


def joined(scheduler: Any) -> Process:
    process = Process()
    scheduler.add_node(process)
    scheduler.add_node_collection(process, TESTS)
    scheduler.schedule()
    return process


def test_the_test_that_crashed_is_named_and_only_the_others_are_run():
    scheduler = scheduling()
    first = joined(scheduler)
    assert first.told == [0, 1, 2, 3]
    for number in (0, 1):
        scheduler.mark_test_complete(first, number)
    assert scheduler.remove_node(first) == TESTS[2]
    second = joined(scheduler)
    assert second.told == [3]
    assert second.shutting_down, "it would wait with its last test for another"
    scheduler.mark_test_complete(second, 3)
    assert scheduler.remove_node(second) is None
    assert not scheduler.has_pending


def test_a_process_that_crashes_at_its_last_test_leaves_nothing():
    scheduler = scheduling()
    first = joined(scheduler)
    for number in (0, 1, 2):
        scheduler.mark_test_complete(first, number)
    assert scheduler.remove_node(first) == TESTS[3]
    assert not scheduler.has_pending
