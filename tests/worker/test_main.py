import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import zmq

from spmd_tx.protocol.agents import decode_any_report
from spmd_tx.protocol.commands import (
    AdapterSpec,
    Shutdown,
)
from spmd_tx.protocol.encoding import encode
from spmd_tx.protocol.envelope import Envelope
from spmd_tx.protocol.memory_plan import MemoryPlan
from spmd_tx.protocol.reports import Beat, Failure, Hello, Progress, Ready, Reply, Written
from spmd_tx.protocol.secret import Keys
from tests.support import moves
from tests.support.forked import Forked
from tests.support.tiny_setup import tiny_setup
from tests.worker import worker_with_a_sum
from tests.worker.test_loop import DECODE

SECRET = "the secret of this test"
CACHE = Path(__file__).parents[2] / ".cache" / "jax-tests"
ADAPTER = AdapterSpec(rank=4)
GENERATION = 5
PLAN = MemoryPlan(pages=5, train_tokens=64, decode_rows=2)
SECONDS = 120


class Group:
    """Worker processes of one generation, and the coordinator's end of their wire."""

    def __init__(self, count, devices):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.RCVTIMEO, 1000 * SECONDS)
        Keys.of(SECRET).guard(self.socket)
        port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.setup = tiny_setup(
            generation=GENERATION,
            num_processes=count,
            jax_coordinator="127.0.0.1",
            fsdp=count,
            tp=devices,
            compilation_cache=str(CACHE),
        )
        self.identities = {}
        self.sequence = 0
        self.processes = [self.start(process, port, devices) for process in range(count)]

    def start(self, process, port, devices):
        options = {
            "coordinator": f"tcp://127.0.0.1:{port}",
            "process-id": process,
            "generation": GENERATION,
            "devices": devices,
        }
        arguments = [f"--{name}={value}" for name, value in options.items()]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "SPMD_TX_SECRET": SECRET}
        return Forked(worker_with_a_sum.run, *arguments, environment=environment, is_worker=True)

    def receive(self):
        """What a worker says next, but for its heartbeat."""
        while isinstance(report := self.next_report(), Beat):
            pass
        return report

    def next_report(self):
        identity, *frames = self.socket.recv_multipart()
        report = decode_any_report(b"".join(frames))
        if isinstance(report, Hello):
            self.identities[report.process] = identity
            if report.process == 0:
                address = f"{self.setup.jax_coordinator}:{report.jax_port}"
                self.setup = msgspec.structs.replace(self.setup, jax_coordinator=address)
            if 0 in self.identities:
                for other in self.identities.values() if report.process == 0 else [identity]:
                    self.socket.send_multipart([other, encode(self.setup)])
        return report

    def until(self, kind):
        """What comes until every worker has sent a report of this kind; those of the kind, by worker."""
        found, others = {}, []
        while len(found) < len(self.processes):
            report = self.receive()
            if isinstance(report, kind):
                found[report.process] = report
            else:
                others.append(report)
        return [found[process] for process in sorted(found)], others

    def send(self, command):
        envelope = Envelope(generation=GENERATION, sequence=self.sequence, command=command)
        self.sequence += 1
        for identity in self.identities.values():
            self.socket.send_multipart([identity, encode(envelope)])

    def close(self):
        for process in self.processes:
            with process:
                process.kill()
        self.socket.close(linger=0)
        self.context.term()


@pytest.fixture
def start():
    groups = []

    def start(count=1, devices=2):
        groups.append(Group(count, devices))
        return groups[-1]

    yield start
    for group in groups:
        group.close()


def number(value):
    """A command that makes every device bring this number."""
    fields = {name: getattr(DECODE, name) for name in DECODE.__struct_fields__}
    return type(DECODE)(**(fields | {"steps": value}))


def listening(process):
    """The addresses where a process can be reached."""
    sockets = psutil.Process(process.pid).net_connections(kind="inet")
    return {each.laddr.ip.removeprefix("::ffff:") for each in sockets if each.status == psutil.CONN_LISTEN}


def own_address():
    """Where Gloo listens, which does the collectives of CPUs: JAX does not let anybody choose."""
    with suppress(OSError):
        return {each[4][0] for each in socket.getaddrinfo(socket.gethostname(), None)}
    return set()


def test_a_worker_gets_ready_runs_commands_and_ends_and_nobody_can_connect_to_it(start):
    group = start()
    (ready,), before = group.until(Ready)
    numerics = {"dtype": "float32"}
    assert ready == Ready(generation=GENERATION, process=0, plan=PLAN, device="2 x cpu", numerics=numerics)
    assert [report.message for report in before if isinstance(report, Progress)] == ["loading weights 50 %"]
    for value in (3, 4):
        group.send(number(value))
    (first,), before = group.until(Reply)
    assert [report.message for report in before] == ["compiling sum 2", ""]
    (second,), _ = group.until(Reply)
    assert [reply.arrays["sum"].tolist() for reply in (first, second)] == [6, 8]
    assert listening(group.processes[0]) == set()
    group.send(Shutdown())
    (last,), _ = group.until(Reply)
    assert last.sequence == 2
    assert group.processes[0].wait(SECONDS) == 0


def test_two_processes_are_one_mesh_and_one_checkpoint_and_no_other_host_reaches_them(start, tmp_path):
    group = start(count=2)
    ready, _ = group.until(Ready)
    assert {report.device for report in ready} == {"4 x cpu"}
    group.send(number(3))
    (leader, follower), _ = group.until(Reply)
    assert leader.arrays["sum"].tolist() == 12
    assert (follower.sequence, follower.arrays) == (0, {})
    reached = [listening(process) for process in group.processes]
    assert reached[0] >= {"127.0.0.1"}
    assert all(addresses <= {"127.0.0.1", *own_address()} for addresses in reached), "by other hosts"

    group.send(moves.save_state(0, tmp_path / "slot", ADAPTER))
    group.send(moves.load_state(0, tmp_path / "slot", ADAPTER, optimizer=True))
    group.until(Reply)
    (leader, _), _ = group.until(Reply)
    assert leader.metrics == {"sum": 2 * np.arange(48).sum(), "step": 4, "fresh_step": 0}

    group.send(moves.snapshot(0, tmp_path / "snapshot", ADAPTER))
    group.send(number(2))
    reports = [group.receive() for _ in range(5)]
    assert [report.path for report in reports if isinstance(report, Written)] == [str(tmp_path / "snapshot")]
    group.send(moves.load_state(0, tmp_path / "snapshot", ADAPTER, optimizer=True))
    (leader, _), _ = group.until(Reply)
    assert leader.metrics == {"sum": 2 * np.arange(48).sum(), "step": 4, "fresh_step": 0}
    group.send(Shutdown())
    group.until(Reply)
    assert [process.wait(SECONDS) for process in group.processes] == [0, 0]


@pytest.mark.parametrize(
    "seed, message",
    [
        (1, "ZeroDivisionError: on purpose"),
        (2, "the weights are not there"),
        (3, "JaxRuntimeError: UNKNOWN: [gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
    ],
)
def test_an_exception_is_reported_and_ends_the_process(start, seed, message):
    group = start()
    group.until(Ready)
    group.send(moves.create_adapter(seed=seed, adapter=ADAPTER))
    (failure,), _ = group.until(Failure)
    assert failure.message == message
    assert (failure.sequence, failure.is_consequence, failure.is_final) == (0, seed == 3, seed == 2)
    assert ("Traceback" in failure.traceback) == (seed != 2)
    _, said = group.processes[0].communicate(timeout=SECONDS)
    assert group.processes[0].returncode == 1
    assert said == failure.traceback + "\n"


def test_a_gap_in_the_commands_ends_the_process(start):
    group = start()
    group.until(Ready)
    group.sequence = 1
    group.send(number(3))
    (failure,), _ = group.until(Failure)
    assert failure.message == "worker 0 of generation 5: expected command 0, received 1"


def test_an_exception_in_one_of_two_processes_ends_it_at_once(start):
    group = start(count=2)
    group.until(Ready)
    del group.identities[0]
    group.send(moves.create_adapter(seed=1, adapter=ADAPTER))
    assert group.processes[1].wait(SECONDS) == 1


def test_a_worker_ends_with_its_coordinator(start):
    group = start()
    group.until(Ready)
    group.socket.close(linger=0)
    _, said = group.processes[0].communicate(timeout=SECONDS)
    assert group.processes[0].returncode == 1
    assert "worker 0 of generation 5 has lost the coordinator" in said


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_signal_to_terminate_ends_a_worker_and_an_interrupt_does_not(start, count):
    group = start(count)
    group.until(Ready)
    for process in group.processes:
        process.send_signal(signal.SIGINT)
    group.send(number(1))
    group.until(Reply)
    for process in group.processes:
        process.terminate()
    assert [process.wait(SECONDS) for process in group.processes] == [-signal.SIGTERM] * count
