import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe

import numpy as np
import pytest

from spmd_tx.protocol.encoding import encode
from spmd_tx.protocol.reports import CustomLossNews
from spmd_tx.worker.custom_loss import messages
from spmd_tx.worker.custom_loss.lanes import WAITING, LossLanes
from tests.worker.custom_loss.commands import SECONDS, Reports, command, limits


@dataclass
class FakeProcess:
    """A process whose part the test plays."""

    pipe: object
    theirs: object
    has_ended: bool = False

    def end(self):
        self.has_ended = True
        self.pipe.close()
        return "was killed by SIGKILL"

    def order(self):
        assert self.theirs.poll(SECONDS)
        return messages.read_order(self.theirs.recv_bytes())

    def answer(self, kind, **fields):
        self.theirs.send_bytes(encode(kind(**fields)))

    def open(self, number, pieces=1):
        order = self.order()
        assert (type(order), order.job) == (messages.Open, number)
        self.answer(messages.Opened, job=number, pieces=pieces)

    def take(self, number, piece=0):
        order = self.order()
        assert (type(order), order.job, order.piece) == (messages.Take, number, piece)

    def taken(self, number, datums):
        none = np.zeros(0, np.float32)
        self.answer(
            messages.Taken,
            job=number,
            datums=np.array(datums),
            losses=np.array(datums, np.float64),
            metrics=np.zeros((len(datums), 0)),
            gradients=none,
        )

    def die(self):
        self.theirs.close()


@dataclass
class Bench:
    """Lanes, and the processes that they have started."""

    lanes: int = 1
    clock: Callable[[], float] = time.monotonic
    reports: Reports = field(default_factory=Reports)
    started: queue.Queue = field(default_factory=queue.Queue)

    def __post_init__(self):
        self.all = LossLanes(self.start, self.lanes, self.reports, self.clock)

    def start(self):
        process = FakeProcess(*Pipe())
        self.started.put(process)
        return process

    def process(self):
        """The next one that was started."""
        process = self.started.get(timeout=SECONDS)
        process.answer(messages.Up)
        return process


def test_a_run_goes_through_its_pieces_and_ends_with_what_they_gave_in_the_order_of_datums():
    bench = Bench()
    bench.all.submit(command(1))
    process = bench.process()
    process.open(1, pieces=2)
    process.take(1, 0)
    process.taken(1, [0, 2])
    process.take(1, 1)
    process.taken(1, [1])
    end = bench.reports.end()
    assert (end.number, end.problem) == (1, None)
    assert end.arrays["losses"].tolist() == [0, 1, 2]
    assert isinstance(process.order(), messages.Close)


def test_pieces_of_two_tenants_take_turns_in_one_process():
    now = 0.0
    bench = Bench(clock=lambda: now)
    bench.all.submit(command(1, tenant="alice"))
    process = bench.process()
    process.open(1, pieces=9)
    process.take(1, 0)
    bench.all.submit(command(2, tenant="bob"))
    while bench.reports.next().number != 2:  # it waits: there is no other process
        pass
    now = 10.0
    process.taken(1, [0])
    process.open(2)
    process.take(2)
    process.taken(2, [0, 1, 2])
    assert bench.reports.end().number == 2


def test_a_tenant_has_one_process_at_a_time_and_another_tenant_the_other():
    bench = Bench(lanes=2)
    bench.all.submit(command(1, tenant="alice"))
    first = bench.process()
    first.open(1)
    first.take(1)
    bench.all.submit(command(2, tenant="alice"))
    bench.all.submit(command(3, tenant="bob"))
    second = bench.process()
    second.open(3)
    second.take(3)
    second.taken(3, [0, 1, 2])
    assert bench.reports.end().number == 3
    assert isinstance(second.order(), messages.Close)
    assert not second.theirs.poll()


def test_what_is_told_of_a_run_says_whether_it_waits_is_compiled_or_run():
    bench = Bench()
    bench.all.submit(command(1))
    process = bench.process()
    process.open(1, pieces=2)
    process.take(1, 0)
    process.answer(messages.LossCompiling, job=1)
    process.answer(messages.LossCompiled, job=1)
    told = [bench.reports.next() for _ in range(5)]
    assert all(isinstance(each, CustomLossNews) for each in told)
    assert [each.doing for each in told] == [
        WAITING,
        "compiling custom loss 'dpo'",
        "running custom loss 'dpo', piece 1 of 2",
        "compiling custom loss 'dpo', piece 1 of 2",
        "running custom loss 'dpo', piece 1 of 2",
    ]


@pytest.mark.parametrize(
    "is_compiling, own, problem",
    [
        (
            True,
            limits(compile_seconds=0.01),
            "compiling loss 'dpo' takes more than 0.01 s (the limit",
        ),
        (False, limits(run_seconds=0.01), "running loss 'dpo' on these datums takes more than 0.01 s"),
    ],
)
def test_a_run_that_takes_too_long_ends_with_its_process_and_the_next_one_goes_on(is_compiling, own, problem):
    bench = Bench()
    bench.all.submit(command(1, limits=own))
    process = bench.process()
    if not is_compiling:
        process.open(1)
        process.take(1)
    bench.all.submit(command(2, tenant="bob"))
    end = bench.reports.end()
    assert (end.number, end.is_given_up, end.is_ours) == (1, is_compiling, False)
    assert problem in end.problem
    assert process.has_ended
    bench.process().open(2)


def test_a_run_without_limits_may_take_as_long_as_it_likes():
    bench = Bench()
    bench.all.submit(command(1, limits=None))
    process = bench.process()
    process.open(1)
    process.take(1)
    process.answer(messages.LossCompiling, job=1)
    process.taken(1, [0, 1, 2])
    assert bench.reports.end().problem is None


def test_a_run_goes_on_in_another_process_where_the_one_before_has_ended():
    bench = Bench()
    bench.all.submit(command(1))
    process = bench.process()
    process.open(1, pieces=2)
    process.take(1, 0)
    process.taken(1, [0, 1])
    process.take(1, 1)
    process.die()
    second = bench.process()
    second.open(1, pieces=2)
    second.take(1, 1)
    second.taken(1, [2])
    assert bench.reports.end().arrays["losses"].tolist() == [0, 1, 2]


def test_a_run_that_ends_two_processes_fails_and_the_next_one_goes_on():
    bench = Bench()
    bench.all.submit(command(1))
    for _ in range(2):
        process = bench.process()
        process.open(1)
        process.take(1)
        process.die()
    end = bench.reports.end()
    assert "loss 'dpo' has ended 2 processes that ran it; the last one was killed by SIGKILL" in end.problem
    assert not end.is_ours
    bench.all.submit(command(2))
    bench.process().open(2)


def test_processes_that_do_not_start_are_the_servers_fault():
    bench = Bench()
    bench.all.submit(command(1))
    for _ in range(2):
        bench.started.get(timeout=SECONDS).die()
    end = bench.reports.end()
    assert end.is_ours
    assert "no process for custom losses could be started" in end.problem


def test_an_answer_that_nobody_understands_fails_what_is_being_run_and_no_more():
    bench = Bench()
    bench.all.submit(command(1))
    bench.process().theirs.send_bytes(b"nonsense")
    end = bench.reports.end()
    assert end.is_ours
    bench.all.submit(command(2))
    bench.process().open(2)
