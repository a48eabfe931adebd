import msgspec
import numpy as np
import pytest

from spmd_tx.coordinator.mesh.hub import NO_COMMAND, Hub
from spmd_tx.errors import CommandGap, WorkerLost
from spmd_tx.protocol.commands import AHEAD, ASIDE, OptimStep
from spmd_tx.protocol.encoding import decode_to_worker
from spmd_tx.protocol.envelope import Envelope
from spmd_tx.protocol.memory_plan import MemoryPlan
from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.protocol.reports import Beat, Compiled, Hello, Progress, Ready, Reply, Written
from tests.support import moves
from tests.support.tiny_setup import tiny_setup

GENERATION = 3
COMMANDS = [moves.create_adapter(slot) for slot in range(5)]
STEP = OptimStep(
    slot=0, learning_rate=1.0, beta1=0.9, beta2=0.9, eps=0.0, weight_decay=0.0, grad_clip_norm=0.0
)


def setup(num_processes):
    return tiny_setup(generation=GENERATION, num_processes=num_processes, jax_coordinator="node-a")


def plan(pages):
    return MemoryPlan(pages=pages, train_tokens=64, decode_rows=2)


class FakeWorker:
    """One worker's end of the wire."""

    def __init__(self, hub, process, generation=GENERATION, identity=None):
        self.hub = hub
        self.origin = {"generation": generation, "process": process}
        self.identity = identity or f"worker {process}".encode()

    def report(self, kind, **fields):
        self.hub.take(self.identity, kind(**self.origin, **fields))

    def received(self):
        """What has been sent to this worker since the last call."""
        return [decode_to_worker(message) for message in self.hub.mail.pop(self.identity, [])]

    def join(self, pages=9):
        self.report(Hello, jax_port=1234)
        self.report(Ready, plan=plan(pages), device="1 x fake")
        return self.received()


class Mail(dict):
    def send(self, identity, message):
        self.setdefault(identity, []).append(message)
        return True


@pytest.fixture
async def hub():
    mail, written, losses = Mail(), [], []
    hub = Hub(
        mail.send,
        on_written=written.append,
        on_custom_loss=losses.append,
        contexts_of=lambda requests: tuple(f"of {each}" for each in requests),
    )
    hub.mail, hub.written = mail, written
    hub.begin(setup(1))
    return hub


@pytest.fixture
async def pair(hub):
    """A hub of two workers."""
    hub.begin(setup(2))
    return hub


async def test_a_worker_that_says_hello_is_told_the_setup_with_where_jax_will_be(hub):
    expected = msgspec.structs.replace(setup(1), jax_coordinator="node-a:1234")
    assert FakeWorker(hub, 0).join() == [expected]


async def test_workers_wait_for_the_setup_until_process_0_has_said_where_jax_will_be(pair):
    first, second = FakeWorker(pair, 0), FakeWorker(pair, 1)
    second.report(Hello)
    assert second.received() == []
    first.report(Hello, jax_port=77)
    for worker in (first, second):
        assert [answer.jax_coordinator for answer in worker.received()] == ["node-a:77"]


async def test_the_port_of_jax_can_be_set(hub):
    hub.begin(msgspec.structs.replace(setup(1), jax_port=8471))
    (answer,) = FakeWorker(hub, 0).join()
    assert answer.jax_coordinator == "node-a:8471"


async def test_all_are_ready_when_the_last_one_is(pair):
    first, second = FakeWorker(pair, 0), FakeWorker(pair, 1)
    assert pair.busy == "starting"
    first.report(Hello, jax_port=77)
    first.report(Progress, message="loading weights 45 %")
    assert pair.busy == "loading weights 45 %"
    first.report(Ready, plan=plan(5), device="")
    assert pair.busy == "waiting for worker 1"
    second.join(pages=7)
    assert (await pair.all_ready()).plan.pages == 5
    assert pair.busy is None


async def test_commands_are_numbered_in_the_order_of_sending(pair):
    workers = FakeWorker(pair, 0), FakeWorker(pair, 1)
    for worker in workers:
        worker.join()
    workers[0].received()
    for command in COMMANDS:
        pair.send(command)
    for worker in workers:
        received = worker.received()
        assert [envelope.sequence for envelope in received] == [0, 1, 2, 3, 4]
        assert [envelope.command for envelope in received] == COMMANDS
        assert all(isinstance(each, Envelope) and each.generation == GENERATION for each in received)


async def test_workers_are_told_the_traces_of_the_requests_that_a_command_is_for(pair):
    worker = FakeWorker(pair, 0)
    worker.join()
    worker.received()
    pair.send(COMMANDS[0], ["one", "two"])
    pair.send(COMMANDS[1])
    assert [envelope.contexts for envelope in worker.received()] == [("of one", "of two"), ()]


async def test_a_reply_is_there_when_all_workers_have_replied_and_carries_the_arrays_of_worker_0(pair):
    workers = FakeWorker(pair, 0), FakeWorker(pair, 1)
    for worker in workers:
        worker.join()
    answers = [pair.send(command) for command in COMMANDS[:2]]
    workers[0].report(Reply, sequence=0, arrays={"tokens": np.arange(3)}, metrics={"grad_norm": 2.0})
    workers[0].report(Reply, sequence=1)
    assert not any(answer.done() for answer in answers)
    assert (pair.answered, pair.current(), pair.current(worker=0)) == (0, 0, None)
    workers[1].report(Reply, sequence=0)
    reply = await answers[0]
    assert reply.arrays["tokens"].tolist() == [0, 1, 2]
    assert reply.metrics == {"grad_norm": 2.0}
    assert not answers[1].done()
    assert (pair.answered, pair.current(), pair.late()) == (1, 1, [1])


async def test_a_missing_reply_ends_everything(hub):
    worker = FakeWorker(hub, 0)
    worker.join()
    for command in COMMANDS[:2]:
        hub.send(command)
    with pytest.raises(CommandGap, match="expected the reply to command 0, received 1"):
        worker.report(Reply, sequence=1)


async def test_a_loss_fails_all_commands_and_blames_one(hub):
    FakeWorker(hub, 0).join()
    answers = [hub.send(command) for command in COMMANDS[:3]]
    hub.lose(WorkerLost("worker 0 is gone", by_command=True), culprit=1)
    blamed = []
    for answer in answers:
        with pytest.raises(WorkerLost, match="worker 0 is gone") as lost:
            await answer
        blamed.append(lost.value.by_command)
    assert blamed == [False, True, False]
    with pytest.raises(WorkerLost, match="worker 0 is gone"):
        await hub.send(COMMANDS[3])


@pytest.mark.parametrize("by_command", [True, False])
async def test_where_the_culprit_is_unknown_all_commands_may_be_it(hub, by_command):
    FakeWorker(hub, 0).join()
    answers = [hub.send(command) for command in COMMANDS[:2]]
    hub.lose(WorkerLost("gone", by_command))
    assert [answer.exception().by_command for answer in answers] == [by_command] * 2


async def test_until_the_next_generation_is_ready_the_loss_is_the_reason_to_wait(hub):
    hub.lose(WorkerLost("worker 0 on node-a was killed"))
    assert hub.busy == "restarting the workers: worker 0 on node-a was killed"
    hub.begin(msgspec.structs.replace(setup(1), generation=GENERATION + 1))
    worker = FakeWorker(hub, 0, generation=GENERATION + 1)
    worker.report(Hello)
    worker.report(Progress, message="loading weights 45 %")
    assert hub.busy.endswith("worker 0 on node-a was killed; loading weights 45 %")
    worker.report(Ready, plan=plan(1), device="")
    await hub.all_ready()
    assert (hub.busy, hub.loss) == (None, None)


async def test_a_worker_of_another_protocol_is_refused(hub):
    with pytest.raises(WorkerLost, match=r"speaks protocol 99 .* install the same version"):
        FakeWorker(hub, 0).report(Hello, version=99)


async def test_messages_of_another_generation_are_ignored(hub):
    old = FakeWorker(hub, 0, generation=GENERATION - 1, identity=b"old")
    old.report(Hello, version=1)
    old.report(Beat, sequence=None)
    FakeWorker(hub, 0).join()
    old.report(Reply, sequence=8)
    assert (await hub.all_ready()).plan.pages == 9


async def test_strangers_are_ignored(hub):
    FakeWorker(hub, 0).join()
    stranger = FakeWorker(hub, 0, identity=b"stranger")
    stranger.report(Hello)
    stranger.report(Reply, sequence=8)
    FakeWorker(hub, 7).report(Hello)
    assert hub.mail.pop(b"stranger", []) == []


async def test_what_is_written_aside_is_passed_on(hub):
    FakeWorker(hub, 0, identity=b"aside").report(Written, path="/snapshot")
    assert [report.path for report in hub.written] == ["/snapshot"]


async def test_commands_have_names(hub):
    FakeWorker(hub, 0).join()
    for command in (COMMANDS[0], STEP):
        hub.send(command)
    assert [hub.name_of(number) for number in range(2)] == ["create_adapter", "optim_step"]


async def test_a_program_is_compiled_when_all_workers_say_so_and_the_slowest_counts(pair):
    workers = [FakeWorker(pair, process) for process in (0, 1)]
    for worker in workers:
        worker.join()
    program = ProgramShape(step="optim_step")
    answer = pair.compile(program, lane=0)
    (envelope,) = workers[1].received()
    assert (envelope.command.number, envelope.command.program) == (1, program)
    assert pair.compiling() == {}
    for worker in workers:
        worker.report(Reply, sequence=0)
    assert pair.compiling() == {1: "optim_step"}
    workers[1].report(Compiled, number=1, seconds=3.0)
    assert not answer.done()
    workers[0].report(Compiled, number=1, seconds=2.0)
    assert (answer.result().seconds, answer.result().error, pair.compiling()) == (3.0, None, {})
    assert not pair.was_useful


async def test_what_is_compiled_aside_has_no_deadline(hub):
    worker = FakeWorker(hub, 0)
    worker.join()
    hub.compile(ProgramShape(step="optim_step"), lane=ASIDE)
    hub.compile(ProgramShape(step="swap_in"), lane=AHEAD)
    for sequence in range(2):
        worker.report(Reply, sequence=sequence)
    assert hub.compiling() == {2: "swap_in"}


@pytest.mark.parametrize("orders, blamed", [([1], [True, False]), (None, [True, True]), ((), [False, False])])
async def test_a_lost_generation_blames_the_orders_that_may_be_the_cause_and_avoids_them(hub, orders, blamed):
    FakeWorker(hub, 0).join()
    programs = [ProgramShape(step="optim_step"), ProgramShape(step="swap_in")]
    answers = [hub.compile(program, lane=lane) for lane, program in enumerate(programs)]
    hub.lose(WorkerLost("too late", by_command=True), NO_COMMAND, orders)
    assert [answer.exception().by_command for answer in answers] == blamed
    assert hub.avoided == {program for program, is_blamed in zip(programs, blamed, strict=True) if is_blamed}
    late = hub.compile(programs[0], lane=0)
    assert not late.exception().by_command, "what is sent to nobody is not the cause"
