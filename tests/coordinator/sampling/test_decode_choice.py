from spmd_tx.coordinator.mesh.program_orders import ProgramOrders
from spmd_tx.protocol.commands import Decode, Prefill
from spmd_tx.protocol.programs import ProgramShape
from tests.coordinator.sampling.bench import Bench, expected, prompt_of

ROWS = 4  # of the bench
SMALL, LARGE = [ProgramShape(step="decode", rows=rows, active=1) for rows in (1, ROWS)]


def carry_out(orders, *programs):
    """Have these compiled."""
    for program in programs:
        orders._ready.setdefault(program.step, {})[program] = None


def prefills():
    return [ProgramShape(step="prefill", rows=rows, row_length=64) for rows in (1, 4)]


def bench_with(*programs):
    orders = ProgramOrders([])
    carry_out(orders, *prefills(), *programs)
    return Bench(rows=ROWS, programs=orders), orders


def test_rows_take_turns_in_a_smaller_program_until_theirs_is_ready():
    bench, _orders = bench_with(SMALL)
    for number in range(3):
        bench.admit(f"{number}", prompt_of(5, number), max_tokens=20, seed=number)
    bench.run()
    for number in range(3):
        wanted, _ = expected("", prompt_of(5, number), 20, seed=number)
        assert bench.tokens(f"{number}") == [wanted]
    assert {len(command.source) for command in bench.sent(Decode)} == {1}


def test_what_would_be_better_is_ordered_and_used_once_it_is_ready():
    bench, orders = bench_with(LARGE)
    bench.admit("a", prompt_of(5), max_tokens=20)
    bench.run()
    assert {len(command.source) for command in bench.sent(Decode)} == {ROWS}
    better = orders.next_order().program
    assert better.rows == 1
    carry_out(orders, better)
    bench.admit("b", prompt_of(5, 1), max_tokens=4)
    bench.run()
    assert len(bench.sent(Decode)[-1].source) == 1


def test_nothing_of_a_request_starts_before_it_can_go_on():
    bench, orders = bench_with()
    bench.admit("a", prompt_of(5), max_tokens=20)
    assert not bench.send()
    (wish,) = bench.batch.program_requests()
    assert (wish.program.step, wish.request_id) == ("decode", "a")
    assert bench.batch.status("a").startswith("waiting for its program: compiling decode 1x")
    carry_out(orders, wish.program, LARGE)
    bench.run()
    assert bench.tokens("a") == [expected("a", prompt_of(5), 20)[0]]
    assert len(bench.sent(Prefill)) == 1
