import threading
from functools import partial

import jax
import numpy as np
import pytest

from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.worker.compile_counts import compile_counts
from spmd_tx.worker.programs import Call, Programs

SECONDS = 30


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
def programs(messages):
    programs = Programs(messages.append)
    yield programs
    assert programs.stop()


def call(step, name="forward", shape=(8, 256), number=1):
    return Call(name, shape, step, (), rest=(np.full(shape, number, np.float32),))


def ahead(programs, mesh, *steps, wait=True):
    """Compile these, in this order, and go on when the last one is there."""
    calls = [call(step, name) for name, step in zip("abc", steps, strict=False)]
    programs.compile_ahead([partial(list, [each]) for each in calls], mesh)
    if wait:
        programs._thread.join(SECONDS)
        assert programs.state().ready == len(steps)
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


def test_a_step_that_compiles_by_itself_is_reported_the_first_time_only(programs, messages):
    for shape in [(2, 3), (2, 3), (4, 5)]:
        with programs.first("custom_loss", shape):
            messages.append("run")
    assert messages == ["compiling custom_loss 2x3", "run", "", "run", "compiling custom_loss 4x5", "run", ""]


def test_what_was_compiled_ahead_is_not_compiled_again(mesh, programs, messages):
    step = Step()
    (program,) = ahead(programs, mesh, step)
    assert programs.run(program, mesh).max() == 2
    assert step.compiled_in == ["programs"]
    assert messages == []


def test_a_command_does_not_wait_for_the_programs_of_others(mesh, programs, messages):
    first, second = Step(), Step()
    first.may_end.clear()
    _, wanted = ahead(programs, mesh, first, second, wait=False)
    assert first.begun.wait(SECONDS)
    programs.run(wanted, mesh)
    assert messages == ["compiling b 8x256, 0 of 2 programs are ready", ""]
    first.may_end.set()
    programs._thread.join(SECONDS)
    assert (first.compiled_in, second.compiled_in) == (["programs"], ["MainThread"])
    assert programs.state().ready == 2


def test_a_command_waits_for_its_program_if_that_is_on_its_way(mesh, programs):
    step = Step()
    step.may_end.clear()
    (wanted,) = ahead(programs, mesh, step, wait=False)
    assert step.begun.wait(SECONDS)
    threading.Timer(0.1, step.may_end.set).start()
    assert programs.run(wanted, mesh).max() == 2
    assert step.compiled_in == ["programs"]


def test_the_menu_stands_still_while_a_command_waits(mesh, programs):
    wanted, first, second = Step(), Step(), Step()
    first.may_end.clear()
    ahead(programs, mesh, first, second, wait=False)
    assert first.begun.wait(SECONDS)
    wanted.may_end.clear()
    command = threading.Thread(target=programs.run, args=(call(wanted, "wanted"), mesh))
    command.start()
    assert wanted.begun.wait(SECONDS)
    first.may_end.set()
    assert not second.begun.wait(0.1)
    wanted.may_end.set()
    command.join(SECONDS)
    assert second.begun.wait(SECONDS)


def test_a_failure_ahead_of_need_ends_nothing_and_is_the_commands_own_when_it_comes(mesh, programs, caplog):
    broken, sound = Step(RuntimeError("no room")), Step()
    wanted, _ = ahead(programs, mesh, broken, sound)
    assert "could not compile a 8x256 ahead: no room" in caplog.text
    with pytest.raises(RuntimeError, match="no room"):
        programs.run(wanted, mesh)
    broken.error = None
    assert programs.run(wanted, mesh).max() == 2


def test_the_end_does_not_wait_for_the_rest_of_the_menu(mesh, messages, monkeypatch):
    monkeypatch.setattr("spmd_tx.worker.programs.STOP_SECONDS", 0.05)
    first, second = Step(), Step()
    first.may_end.clear()
    programs = Programs(messages.append)
    ahead(programs, mesh, first, second, wait=False)
    assert first.begun.wait(SECONDS)
    assert not programs.stop()
    first.may_end.set()
    assert programs.stop()
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
