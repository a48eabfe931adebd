import threading
from functools import partial
from queue import SimpleQueue

import jax
import numpy as np
import pytest

from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.worker.programs.compile_counts import compile_counts
from spmd_tx.worker.programs.compiled import Call, CompileOrder, Programs, compile_threads

SECONDS = 30
PROGRAM = ProgramShape(step="forward", rows=8, row_length=256)


class Step:
    """What a jitted function is to the programs; each compilation waits until it may end."""

    def __init__(self, error=None):
        self.error = error
        self.compiled_in = []  # threads
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.may_end.set()

    def lower(self, *arguments):
        return self

    def compile(self):
        self.compiled_in.append(threading.current_thread().name)
        self.begun.set()
        assert self.may_end.wait(SECONDS)
        if self.error is not None:
            raise self.error
        return lambda number: number + 1


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(1, 1, 1)


@pytest.fixture
def messages():
    return []


@pytest.fixture
def settled():
    """(number, error) of orders, as they are settled."""
    return SimpleQueue()


@pytest.fixture
def programs(messages, settled):
    programs = Programs(messages.append, lambda number, seconds, error: settled.put((number, error)))
    yield programs
    assert programs.stop()


def call(step, name="forward", shape=(8, 256), number=1):
    return Call(name, shape, step, (), rest=(np.full(shape, number, np.float32),))


def order(programs, mesh, *steps, lane=0):
    """Order these, in this order; gives a call of each."""
    calls = [call(step, name) for name, step in zip("abc", steps, strict=False)]
    for number, each in enumerate(calls):
        programs.order(CompileOrder(number, PROGRAM, partial(list, [each])), mesh, lane=lane)
    return calls


def test_a_program_is_compiled_once_for_each_shape_and_commands_that_wait_are_told(mesh, programs, messages):
    step = Step()
    for shape in [(8, 256), (8, 256), (8, 512)]:
        assert programs.run(call(step, shape=shape), mesh).max() == 2
        messages.append("run")
    assert messages == [
        *("compiling forward 8x256", "", "run"),
        "run",
        *("compiling forward 8x512", "", "run"),
    ]
    assert len(step.compiled_in) == 2


@pytest.mark.parametrize("lane", [0, 1, 3])
def test_what_was_ordered_is_run_without_waiting(mesh, programs, messages, settled, caplog, lane):
    step = Step()
    (program,) = order(programs, mesh, step, lane=lane)
    assert settled.get(timeout=SECONDS) == (0, None)
    assert programs.run(program, mesh).max() == 2
    assert len(step.compiled_in) == 1
    assert step.compiled_in != ["MainThread"]
    assert (messages, caplog.text, programs.state().unforeseen) == ([], "", 0)


def test_what_somebody_waits_for_does_not_wait_for_what_is_compiled_ahead(mesh, programs, settled):
    ahead, wanted = Step(), Step()
    ahead.may_end.clear()
    order(programs, mesh, ahead, lane=1)
    assert ahead.begun.wait(SECONDS)
    programs.order(CompileOrder(7, PROGRAM, lambda: [call(wanted, "wanted")]), mesh, lane=0)
    assert settled.get(timeout=SECONDS) == (7, None)
    ahead.may_end.set()
    assert settled.get(timeout=SECONDS) == (0, None)


def test_orders_of_a_kind_are_carried_out_one_after_the_other(mesh, programs, settled):
    first, second = Step(), Step()
    first.may_end.clear()
    order(programs, mesh, first, second)
    assert first.begun.wait(SECONDS)
    assert second.compiled_in == []
    first.may_end.set()
    assert [settled.get(timeout=SECONDS) for _ in range(2)] == [(0, None), (1, None)]


def test_a_program_that_is_ordered_twice_is_compiled_once(mesh, programs, settled):
    step = Step()
    step.may_end.clear()
    order(programs, mesh, step, lane=1)
    assert step.begun.wait(SECONDS)
    order(programs, mesh, step)
    step.may_end.set()
    assert [settled.get(timeout=SECONDS) for _ in range(2)] == [(0, None), (0, None)]
    assert len(step.compiled_in) == 1


def test_a_command_whose_program_nobody_has_ordered_compiles_it_and_says_so(mesh, programs, messages, caplog):
    step = Step()
    assert programs.run(call(step), mesh).max() == 2
    assert step.compiled_in == ["MainThread"]
    assert "commands wait for forward 8x256, which nobody has ordered" in caplog.text
    assert programs.state().unforeseen == 1


def test_a_program_that_cannot_be_compiled_is_told_and_the_next_one_is(mesh, programs, settled, caplog):
    broken, sound = Step(RuntimeError("no room")), Step()
    wanted, _ = order(programs, mesh, broken, sound)
    assert [settled.get(timeout=SECONDS) for _ in range(2)] == [(0, "RuntimeError: no room"), (1, None)]
    assert "could not compile forward 8x256: no room" in caplog.text
    broken.error = None
    order(programs, mesh, broken)
    assert settled.get(timeout=SECONDS) == (0, None)
    assert programs.run(wanted, mesh).max() == 2


def test_the_end_does_not_wait_for_what_is_ordered(mesh, messages, monkeypatch):
    monkeypatch.setattr("spmd_tx.worker.programs.lane.STOP_SECONDS", 0.05)
    first, second = Step(), Step()
    first.may_end.clear()
    programs = Programs(messages.append)
    order(programs, mesh, first, second)
    assert first.begun.wait(SECONDS)
    assert not programs.stop()
    first.may_end.set()
    programs._lanes[0]._thread.join(SECONDS)
    assert second.compiled_in == []


def count_of(program):
    counts = [each for each in compile_counts().all() if each.program == program]
    return sum(each.count for each in counts), sum(each.seconds for each in counts) > 0


def test_what_jax_compiles_is_counted_for_its_program(mesh, programs):
    programs.run(call(jax.jit(lambda x: x + 7), "counted"), mesh)
    assert count_of("counted") == (1, True)
    before, _ = count_of("other")
    jax.jit(lambda x: x + 9)(np.ones(3, np.float32))
    assert count_of("other") == (before + 1, True)


@pytest.mark.parametrize(
    "platform, processors, threads",
    [("cpu", 64, 1), ("gpu", 64, 1), ("tpu", 2, 1), ("tpu", 8, 2), ("tpu", 112, 4)],
)
def test_only_where_compiling_disturbs_no_device_several_threads_do_it(platform, processors, threads):
    assert compile_threads(platform, processors) == threads
