"""Programs that nobody waits for are compiled in a process of the lowest priority, and kept for later."""

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from queue import SimpleQueue

import jax
import numpy as np
import psutil
import pytest
from jax import monitoring

from spmd_tx.demo import tiny_model
from spmd_tx.protocol import commands
from spmd_tx.protocol.commands import AHEAD, ASIDE, AWAITED
from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.programs import aside
from spmd_tx.worker.programs.compile_counts import compile_counts
from spmd_tx.worker.programs.compiled import Programs
from tests.support import moves
from tests.support.forked import Forked
from tests.support.processes import command_line, until_ended
from tests.support.tiny_setup import tiny_setup

pytestmark = pytest.mark.usefixtures("plainly_compiled")  # a child takes over JAX's settings

SECONDS = 120
SPEC = tiny_model.Spec(n_layers=1, n_kv_heads=2, vocab_size=272)
CREATE = ProgramShape(step="create_adapter")
READ = ProgramShape(step="save_state")  # compiles fastest
TRACED = "/jax/core/compile/jaxpr_trace_duration"
REAL_MAIN = aside.MAIN

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("aside") / "model", SPEC)


@pytest.fixture(scope="module", autouse=True)
def _child_compiles_at_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aside, "MAIN", "tests.worker.programs.aside_at_once")
        yield


class Worker:
    """An engine and what it reports of orders."""

    def __init__(self, model_dir: Path, cache: Path | None) -> None:
        self.settled: SimpleQueue[tuple[int, str | None]] = SimpleQueue()
        self.programs = Programs(lambda _: None, lambda number, _, error: self.settled.put((number, error)))
        setup = tiny_setup(
            model_dir=str(model_dir),
            dtype="float32",
            max_rank=4,
            fsdp=2,
            kv_cache_tokens=128,
            compilation_cache="" if cache is None else str(cache),
            idle_adapters=str(model_dir.parent / "idle"),
        )
        self.engine = Engine.start(setup, self.programs, lambda _: None)
        self.ordered = 0

    def order(self, *programs: ProgramShape, lane: int = ASIDE, is_last: bool = False) -> None:
        for program in programs:
            self.ordered += 1
            number = self.ordered
            command = commands.Compile(number=number, program=program, lane=lane, is_last=is_last)
            self.engine.execute(command)

    def outcome(self) -> tuple[int, str | None]:
        return self.settled.get(timeout=SECONDS)

    @property
    def child(self) -> psutil.Process | None:
        found = [process for process in psutil.Process().children() if aside.MAIN in command_line(process)]
        return found[0] if found else None


@pytest.fixture
def start(model_dir, tmp_path):
    workers = []

    def start(cache: Path | None = tmp_path / "cache") -> Worker:
        workers.append(Worker(model_dir, cache))
        return workers[-1]

    yield start
    for worker in workers:
        assert worker.programs.stop()


def until_there(worker: Worker) -> psutil.Process:
    deadline = time.monotonic() + SECONDS
    while (child := worker.child) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return child


def sources(program: str) -> dict[str, int]:
    return {each.source: each.count for each in compile_counts().all() if each.program == program}


def news(program: str, before: dict[str, int]) -> dict[str, int]:
    """How often the program has come from where since then."""
    counts = {source: count - before.get(source, 0) for source, count in sources(program).items()}
    return {source: count for source, count in counts.items() if count}


def fresh_adapter(worker: Worker) -> list[np.ndarray]:
    worker.engine.execute(moves.create_adapter(seed=7))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(worker.engine.state.train)]


@linux_only
def test_the_child_gets_the_lowest_priority_before_it_starts_threads(start, monkeypatch):
    monkeypatch.setattr(aside, "MAIN", REAL_MAIN)
    worker = start()
    worker.order(READ)
    child = until_there(worker)
    deadline = time.monotonic() + SECONDS
    while os.sched_getscheduler(child.pid) != os.SCHED_IDLE:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    threads = [int(task.name) for task in Path(f"/proc/{child.pid}/task").iterdir()]
    assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_IDLE}


@linux_only
@pytest.mark.slow  # it runs only when nobody else does
def test_every_thread_of_the_child_runs_only_when_nobody_else_wants_the_processor(start, monkeypatch):
    monkeypatch.setattr(aside, "MAIN", REAL_MAIN)
    worker = start()
    worker.order(READ)
    assert worker.outcome() == (1, None)
    threads = [int(task.name) for task in Path(f"/proc/{until_there(worker).pid}/task").iterdir()]
    assert len(threads) > 2
    assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_IDLE}


@linux_only
@pytest.mark.slow
def test_the_child_stands_back_while_commands_run_and_gets_ahead_all_the_same(start):
    worker = start()
    worker.order(READ)
    child = until_there(worker)
    worker.programs.at_work(True)
    seen = set()
    while not {psutil.STATUS_STOPPED, psutil.STATUS_RUNNING} <= seen:
        seen.add(child.status())
    assert worker.outcome() == (1, None)
    worker.programs.at_work(False)
    worker.order(CREATE)
    assert worker.outcome() == (2, None)
    assert child.status() != psutil.STATUS_STOPPED


@pytest.fixture(scope="module")
def kept(model_dir, tmp_path_factory):
    """The folder of a worker that has compiled two programs aside."""
    folder, before = tmp_path_factory.mktemp("kept") / "cache", sources("create_adapter")
    worker = Worker(model_dir, folder)
    worker.order(CREATE, READ, is_last=True)
    assert [worker.outcome() for _ in range(2)] == [(1, None), (2, None)]
    assert news("create_adapter", before) == {"compiler": 1, "store": 1}
    assert worker.child is None  # it has given its memory back
    assert worker.programs.stop()
    return folder


def test_a_second_start_traces_nothing_compiles_nothing_and_computes_the_same(start, kept):
    second, before, traced = start(kept), sources("create_adapter"), []
    monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: traced.append(event) if event == TRACED else None
    )
    second.order(CREATE, READ)
    assert [second.outcome() for _ in range(2)] == [(1, None), (2, None)]
    assert (traced, second.child) == ([], None)
    assert news("create_adapter", before) == {"store": 1}

    alone = start(None)
    alone.order(CREATE, lane=AWAITED)
    assert alone.outcome() == (1, None)
    assert traced
    for one, other in zip(fresh_adapter(second), fresh_adapter(alone), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_death_of_the_child_fails_nothing(start, caplog):
    worker = start()
    for number, program in enumerate((READ, CREATE), start=1):
        worker.order(program)
        until_there(worker).kill()
        assert worker.outcome() == (number, None)
    assert caplog.text.count("the process that compiles ahead was killed by SIGKILL") == 2
    assert fresh_adapter(worker)
    worker.order(ProgramShape(step="swap_out"))
    assert worker.outcome() == (3, None)
    assert worker.child is None  # two have died, and there is no third


def test_a_program_that_somebody_waits_for_does_not_wait_for_the_child(start):
    worker = start()
    worker.order(READ)
    child = until_there(worker)
    child.send_signal(signal.SIGSTOP)
    worker.order(READ, lane=AWAITED)
    assert worker.outcome() == (2, None)
    worker.order(CREATE, lane=AHEAD)
    assert worker.outcome() == (3, None)
    child.send_signal(signal.SIGCONT)
    assert worker.outcome() == (1, None)


def work(model_dir: Path, cache: Path, is_stopped: bool) -> None:
    """Order a program, say which process compiles it, and wait to be killed."""
    from tests.support import engine_setup  # noqa: F401 - a worker of several devices

    worker = Worker(model_dir, cache)
    worker.order(READ)
    child = until_there(worker)
    if is_stopped:
        assert worker.outcome() == (1, None)  # only a child that has begun is stopped
        child.suspend()
    print(child.pid, flush=True)
    time.sleep(600)


@pytest.mark.parametrize("is_stopped", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_child_ends_with_a_worker_that_is_killed(start, tmp_path, model_dir, is_stopped):
    with Forked(work, model_dir, tmp_path / "cache", is_stopped, is_worker=True) as worker:
        child = psutil.Process(int(worker.stdout.readline()))
        worker.kill()
    until_ended([child], SECONDS)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda content: content[:1000], marks=pytest.mark.slow),
        lambda content: content[:-1] + b"?",
    ],
)
def test_a_damaged_file_is_compiled_and_written_again(start, kept, tmp_path, damage, caplog):
    shutil.copytree(kept, tmp_path / "cache")
    for file in (tmp_path / "cache").glob("program-*"):
        file.write_bytes(damage(file.read_bytes()))
    for expected in ({"compiler": 1, "store": 1}, {"store": 1}):
        worker, before = start(), sources("read_adapter")
        worker.order(READ)
        assert worker.outcome() == (1, None)
        assert news("read_adapter", before) == expected
    assert caplog.text.count("it is damaged") == 1
