import pytest

from spmd_tx.worker.custom_loss.turns import LossTurns


def worked(turns, seconds, count, tenants):
    """Who gets its turn, if each of them takes so many seconds."""
    order = []
    for _ in range(count):
        run = turns.next(busy=())
        turns.had_its_turn(run)
        turns.charge(tenants[run], seconds[tenants[run]])
        order.append(run)
    return order


def test_tenants_get_equal_time_however_many_runs_they_have_and_however_long_their_pieces():
    turns, tenants = LossTurns(), {1: "a", 2: "a", 3: "a", 4: "b"}
    for run, tenant in tenants.items():
        turns.add(run, tenant)
    order = worked(turns, {"a": 8.0, "b": 1.0}, 18, tenants)
    assert order.count(4) == 16


def test_runs_of_a_tenant_take_turns():
    turns, tenants = LossTurns(), {1: "a", 2: "a"}
    for run, tenant in tenants.items():
        turns.add(run, tenant)
    assert worked(turns, {"a": 1.0}, 4, tenants) == [1, 2, 1, 2]


def test_a_tenant_that_is_at_work_gets_no_second_process():
    turns = LossTurns()
    turns.add(1, "a")
    turns.add(2, "a")
    assert turns.next(busy={"a"}) is None
    turns.add(3, "b")
    assert turns.next(busy={"a"}) == 3


def test_who_has_spent_much_waits_for_those_who_come_until_they_have_too():
    turns = LossTurns()
    turns.add(1, "greedy")
    turns.charge("greedy", 100.0)
    turns.drop(1)
    turns.add(2, "other")
    turns.add(3, "greedy")
    assert turns.next(busy=()) == 2
    turns.charge("other", 101.0)
    assert turns.next(busy=()) == 3


def test_nobody_saves_up_time_by_not_being_there():
    turns, tenants = LossTurns(), {1: "old", 2: "new"}
    turns.add(1, "old")
    turns.charge("old", 100.0)
    turns.add(2, "new")
    assert worked(turns, {"old": 1.0, "new": 1.0}, 6, tenants).count(1) == 3


@pytest.mark.parametrize("count", [10_000])
def test_tenants_that_are_gone_are_forgotten(count):
    turns = LossTurns()
    for number in range(count):
        turns.add(number, f"tenant {number}")
        turns.drop(number)
    assert len(turns._spent) <= 1001
