import pytest

from spmd_tx.coordinator.mesh.program_orders import (
    ProgramOrders,
    ProgramRequest,
)
from spmd_tx.coordinator.runtime.mesh_record import MenuProgress
from spmd_tx.protocol.commands import AHEAD, ASIDE, AWAITED, HELPING
from spmd_tx.protocol.programs import ProgramShape


def program(length, step="forward"):
    return ProgramShape(step=step, rows=1, row_length=length)


MENU = [program(length) for length in (16, 64, 96)]


@pytest.fixture
def orders():
    return ProgramOrders(MENU)


def request(length, session="alice"):
    return ProgramRequest(program(length), session, f"request of {session}")


def order(orders, *requests):
    orders.update_awaited(requests)
    return orders.next_order()


def carry_out(orders, *requests, seconds=1.0, error=None):
    """The next order, which is settled at once; gives its program's row length, or None."""
    given = order(orders, *requests)
    if given is not None:
        orders.settled(given, seconds, error)
    return given and given.program.row_length


def test_the_menu_is_compiled_in_its_order_one_after_the_other(orders):
    first = order(orders)
    assert (first.program, first.lane) == (MENU[0], AHEAD)
    assert order(orders) is None
    orders.settled(first, 1.0, None)
    assert [carry_out(orders) for _ in range(3)] == [64, 96, None]
    assert orders.progress == MenuProgress(3, 3)


def test_several_threads_share_the_menu_while_nobody_waits():
    orders = ProgramOrders(MENU, threads=2)
    first, second = order(orders), order(orders)
    assert [first.program, second.program] == MENU[:2]
    assert (first.lane, second.lane) == (AHEAD, HELPING[0])
    assert order(orders) is None
    awaited = order(orders, request(500))
    assert awaited.lane == AWAITED
    orders.settled(second, 1.0, None)
    assert order(orders) is None, "somebody waits"
    orders.settled(awaited, 1.0, None)
    third = order(orders)
    assert (third.program, third.lane) == (MENU[2], HELPING[0])


def test_what_somebody_waits_for_is_ordered_beside_what_is_compiled_ahead(orders):
    ahead = order(orders)
    awaited = order(orders, request(500))
    assert (awaited.program, awaited.lane) == (program(500), AWAITED)
    assert order(orders, request(500), request(600)) is None
    orders.settled(ahead, 1.0, None)
    assert order(orders, request(500), request(600)) is None  # the menu waits for those who wait
    assert orders.progress == MenuProgress(1, 3, ("forward 1x500",))
    orders.settled(awaited, 1.0, None)
    assert order(orders, request(500), request(600)).program == program(600)


def test_nobody_waits_for_the_program_of_another_session_alone(orders):
    assert order(orders, request(500), request(501)).lane == AWAITED
    assert order(orders, request(500), request(501)) is None
    beside = order(orders, request(500), request(501), request(600, "bob"))
    assert (beside.program, beside.lane) == (program(600), AHEAD)
    assert order(orders, request(500), request(501), request(600, "bob"), request(700, "carol")) is None


def test_what_is_compiled_ahead_is_not_ordered_again_when_it_is_waited_for(orders):
    ahead = order(orders)
    assert order(orders, request(16)) is None
    orders.settled(ahead, 1.0, None)
    assert orders.is_ready(MENU[0])


def test_what_is_better_than_what_is_used_comes_before_the_menu(orders):
    orders.prefer(program(300))
    better = order(orders)
    assert (better.program, better.is_better) == (program(300), True)
    orders.settled(better, 1.0, None)
    ahead = order(orders)
    assert (ahead.program, ahead.is_better) == (program(16), False)
    orders.settled(ahead, 1.0, None)
    assert [carry_out(orders) for _ in range(2)] == [64, 96]


def test_sessions_take_turns_however_much_they_wait_for(orders):
    requests = [
        *(request(length, "greedy") for length in range(1000, 1010)),
        request(500, "modest"),
        request(501, "modest"),
    ]
    turns = []
    while len(turns) < 5:
        turns.append(carry_out(orders, *(each for each in requests if not orders.is_ready(each.program))))
    assert turns == [1000, 500, 1001, 501, 1002]


def test_who_takes_long_waits_until_others_had_as_much(orders):
    requests = [
        *(request(1000 + n, "slow") for n in range(3)),
        *(request(500 + n, "quick") for n in range(9)),
    ]
    turns = []
    while len(turns) < 6:
        left = [each for each in requests if not orders.is_ready(each.program)]
        given = order(orders, *left)
        orders.settled(given, 4.0 if "slow" in given.sessions else 1.0, None)
        turns.append(given.program.row_length)
    assert turns == [1000, 500, 501, 502, 503, 1001]


def test_those_who_wait_pay_for_the_seconds_together_and_nobody_for_the_menu(orders):
    ahead = order(orders)
    assert orders.settled(ahead, 9.0, None) == {}
    awaited = order(orders, request(500, "alice"), request(500, "bob"), request(600, "carol"))
    assert orders.settled(awaited, 3.0, None) == dict.fromkeys(("alice", "bob"), 1.5)


def test_what_cannot_be_compiled_is_tried_again_when_somebody_wants_it_only(orders):
    assert carry_out(orders, error="no room") == 16
    assert orders.has_failed(MENU[0])
    orders.prefer(MENU[0])
    assert [carry_out(orders) for _ in range(3)] == [64, 96, None]
    assert carry_out(orders, request(16)) == 16
    assert (orders.is_ready(MENU[0]), orders.has_failed(MENU[0])) == (True, False)


def test_nothing_is_ordered_ahead_while_only_what_is_awaited_may_be(orders):
    assert orders.next_order(only_awaited=True) is None
    orders.update_awaited([request(500)])
    assert orders.next_order(only_awaited=True) is not None


@pytest.fixture
def aside():
    """Orders to workers that compile aside."""
    return ProgramOrders(MENU, aside=True)


def test_the_menu_is_compiled_aside_whoever_waits(aside):
    awaited = order(aside, request(500))
    assert (awaited.program, awaited.lane) == (program(500), AWAITED)
    ahead = order(aside, request(500))
    assert (ahead.program, ahead.lane) == (MENU[0], ASIDE)
    assert order(aside, request(500), request(600, "bob")).lane == AHEAD
    assert order(aside, request(500), request(600, "bob")) is None
    aside.settled(ahead, 1.0, None)
    assert order(aside, request(500), request(600, "bob")).program == MENU[1]


def test_what_is_compiled_aside_is_ordered_again_when_it_is_waited_for(aside):
    ahead = order(aside)
    awaited = order(aside, request(16))
    assert (awaited.program, awaited.lane) == (ahead.program, AWAITED)
    assert order(aside, request(16)) is None
    aside.settled(awaited, 1.0, None)
    aside.settled(ahead, 9.0, "no room")
    assert (aside.is_ready(MENU[0]), aside.has_failed(MENU[0])) == (True, False)


def test_what_somebody_has_had_compiled_is_not_compiled_aside(aside):
    awaited = order(aside, request(16))
    assert order(aside, request(16)).program == MENU[1]
    aside.settled(awaited, 1.0, None)
    assert aside.is_ready(MENU[0])


def test_nothing_is_compiled_aside_while_only_what_is_awaited_may_be(aside):
    assert aside.next_order(only_awaited=True) is None


def test_who_waits_is_told_what_for_and_how_many_come_before(orders):
    order(orders, request(500), request(600), request(700, "bob"))
    assert orders.reason(program(500)) == "waiting for its program: compiling forward 1x500"
    assert (
        orders.reason(program(700)) == "waiting for its program: compiling forward 1x700 (1 other before it)"
    )
    assert (
        orders.reason(program(600)) == "waiting for its program: compiling forward 1x600 (2 others before it)"
    )


@pytest.mark.parametrize(
    "shape, text",
    [
        (ProgramShape(step="optim_step"), "optim_step"),
        (ProgramShape(step="forward", rows=4, row_length=256, targets=8), "forward 4x256x8"),
        (ProgramShape(step="forward", rows=4, row_length=64, sequences=True), "forward of sequences 4x64"),
        (ProgramShape(step="prefill", rows=1, row_length=64, logprobs=True), "prefill with logprobs 1x64"),
        (
            ProgramShape(step="prefill", rows=1, row_length=64, logprobs=True, table=32, top=4),
            "continued prefill with scores 1x64x32x4",
        ),
        (ProgramShape(step="decode", rows=4, table=16, active=2), "decode 4x16x2"),
    ],
)
def test_a_program_has_a_name_for_people(shape, text):
    assert str(shape) == text
