import queue
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from spmd_tx.custom_loss.limits import LossLimits
from spmd_tx.protocol.commands import CustomLoss
from spmd_tx.protocol.reports import CustomLossEnd, CustomLossNews
from spmd_tx.worker.custom_loss import messages
from spmd_tx.worker.custom_loss.lanes import WAITING, ChildProcess, LossLanes
from spmd_tx.worker.custom_loss.run import CustomLosses
from tests.custom_loss.recorded import recorded
from tests.sdk.server import COMPILED

SECONDS = 60  # until a test gives up
PLENTY = LossLimits(
    operations_per_datum=1e12, operations=1e12, programs=64, compile_seconds=1e6, run_seconds=1e6
)


def limits(**changes):
    return LossLimits(**{name: getattr(PLENTY, name) for name in PLENTY.__struct_fields__} | changes)


def command(number, case="dpo", tenant="alice", limits=PLENTY):
    """What the coordinator sends for the recorded datums."""
    case = recorded()[case]
    names = [each["name"] for each in case.definition["inputs"]]
    columns = [[datum[name] for datum in case.data] for name in names]
    return CustomLoss(
        number=number,
        tenant=tenant,
        definition=case.body,
        lengths=np.array([len(datum["logprobs"]) for datum in case.data], np.int32),
        widths=np.array([[each.shape[1] if each.ndim == 2 else 0 for each in column] for column in columns]),
        values=[np.concatenate([each.ravel() for each in column]) for column in columns],
        limits=limits,
    )


class Reports:
    """What lanes report, as the coordinator would hear it."""

    def __init__(self):
        self.heard = queue.Queue()

    def __call__(self, kind, **fields):
        self.heard.put(kind(generation=1, process=0, **fields))

    def next(self):
        return self.heard.get(timeout=SECONDS)

    def end(self, number=None):
        """Of the run, or the next one, passing over news."""
        while not isinstance(report := self.next(), CustomLossEnd) or number not in (None, report.number):
            pass
        return report


# --- with processes that do what the test says ------------------------------------------------------------


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
        self.theirs.send_bytes(messages.written(kind(**fields)))

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
    process.answer(messages.Compiling, job=1)
    process.answer(messages.Compiled, job=1)
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
    process.answer(messages.Compiling, job=1)
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


def hungry(definition):
    """The same loss with one more metric, for which values of 64 MiB are gone through."""

    def node(target, *args, name):
        return {"op": "call_function", "name": name, "target": target, "args": list(args), "kwargs": {}}

    *nodes, output = definition["graph"]["nodes"]
    nodes += [
        node("torch.sum", {"ref": "logprobs"}, name="hungry_sum"),
        node("torch.full", [1 << 12, 1 << 11], 1.0, name="hungry_full"),
        node("operator.mul", {"ref": "hungry_full"}, {"ref": "hungry_sum"}, name="hungry_mul"),
        node("torch.cumsum", {"ref": "hungry_mul"}, 0, {"dtype": "float64"}, name="hungry_rows"),
        node("torch.cumsum", {"ref": "hungry_rows"}, 1, name="hungry_columns"),
        node("torch.mul", {"ref": "hungry_rows"}, {"ref": "hungry_columns"}, name="hungry_products"),
        node("torch.mean", {"ref": "hungry_products"}, name="hungry"),
    ]
    metrics = {"custom/hungry:mean": {"ref": "hungry"}}
    loss = output["args"][0]["tuple"][0]
    output = output | {"args": [{"tuple": [loss, {"dict": metrics}]}]}
    return msgspec.json.encode(definition | {"graph": definition["graph"] | {"nodes": [*nodes, output]}})


# --- with real ones ---------------------------------------------------------------------------------------


@contextmanager
def lanes_with(memory_bytes):
    """A lane with a real process, which ends with it."""
    reports, before = Reports(), set(losses_of_this_process())
    COMPILED.mkdir(parents=True, exist_ok=True)
    try:
        yield LossLanes(partial(ChildProcess, memory_bytes, str(COMPILED)), 1, reports), reports
    finally:
        for process in set(losses_of_this_process()) - before:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def real():
    with lanes_with(1 << 30) as real:
        yield real


def losses_of_this_process():
    children = psutil.Process().children()
    return [child for child in children if "spmd_tx.worker.custom_loss.process" in child.cmdline()]


@pytest.mark.parametrize("case", ["dpo", "top_k_entropy"])
def test_another_process_gives_the_same_bits(real, case):
    lanes, reports = real
    lanes.submit(command(1, case))
    found = reports.end(1).arrays
    here = recorded()[case]
    names = [each["name"] for each in here.definition["inputs"]]
    expected = CustomLosses().run(here.body, [[datum[name] for name in names] for datum in here.data])
    assert (found["losses"] == expected.losses_D).all()
    assert (found["metrics"] == expected.metrics_DM).all()
    assert (found["gradients"] == np.concatenate([each.ravel() for each in expected.gradients])).all()


def test_a_refusal_comes_with_its_reason(real):
    lanes, reports = real
    lanes.submit(command(2, limits=limits(operations=10)))
    end = reports.end(2)
    assert "at most 10 are taken in one request (the limit custom_loss_operations)" in end.problem
    assert not end.is_given_up


def test_a_loss_that_needs_too_much_memory_fails_alone():
    with lanes_with(100 << 20) as (lanes, reports):
        lanes.submit(command(3))
        assert reports.end(3).problem is None
        large = command(4)
        lanes.submit(msgspec.structs.replace(large, definition=hungry(recorded()["dpo"].definition)))
        end = reports.end(4)
        assert "memory" in end.problem
        assert not end.is_ours
        lanes.submit(command(5))
        assert reports.end(5).problem is None


def test_a_process_that_is_killed_is_replaced(real):
    lanes, reports = real
    lanes.submit(command(4))
    assert reports.end(4).problem is None
    (process,) = losses_of_this_process()
    process.kill()
    process.wait()
    lanes.submit(command(5))
    assert reports.end(5).problem is None


def test_a_process_ends_with_its_worker_also_in_the_middle_of_a_compilation(tmp_path):
    script = Path(__file__).with_name("loss_owner.py")
    with subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        while b"compiling" not in owner.stdout.readline():
            pass
        (process,) = psutil.Process(owner.pid).children()
        owner.kill()
    gone, alive = psutil.wait_procs([process], timeout=SECONDS)
    assert gone
    assert not alive


def test_a_process_is_given_no_secret(real, monkeypatch):
    lanes, reports = real
    lanes.submit(command(6))
    assert reports.end(6).problem is None
    (process,) = losses_of_this_process()
    assert "SPMD_TX_SECRET" not in process.environ()
    assert process.nice() > psutil.Process().nice()
