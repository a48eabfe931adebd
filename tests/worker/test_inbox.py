from contextlib import closing

import jax.numpy as jnp
import pytest
import zmq

from spmd_tx.errors import CommandGap, MeshError
from spmd_tx.protocol.agents import decode_any_report
from spmd_tx.protocol.commands import Shutdown
from spmd_tx.protocol.encoding import encode
from spmd_tx.protocol.envelope import Envelope
from spmd_tx.protocol.memory_plan import MemoryPlan
from spmd_tx.protocol.reports import Beat, Hello, Ready, Written
from spmd_tx.protocol.secret import Keys
from spmd_tx.worker import inbox as inbox_module
from spmd_tx.worker.heartbeat import Heartbeat
from spmd_tx.worker.inbox import Inbox
from spmd_tx.worker.result_signal import ResultSignal
from tests.support import moves
from tests.support.tiny_setup import tiny_setup

GENERATION = 3
PLAN = MemoryPlan(pages=9, train_tokens=64, decode_rows=2)
COMMANDS = [moves.create_adapter(slot) for slot in range(5)]
KEYS = Keys.of("the secret of this test")
SECONDS = 30.0  # until a test that waits for a message gives up


def setup(generation=GENERATION):
    return tiny_setup(generation=generation, jax_coordinator="127.0.0.1:1")


class Coordinator:
    """The other end of the wire."""

    def __init__(self, address=None):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.RCVTIMEO, int(1000 * SECONDS))
        KEYS.guard(self.socket)
        if address is None:
            address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        else:
            self.socket.bind(address)
        self.address = address
        self.worker = None

    def receive(self):
        self.worker, message = self.socket.recv_multipart()
        return decode_any_report(message)

    def send(self, message):
        self.socket.send_multipart([self.worker, encode(message)])

    def command(self, sequence, generation=GENERATION):
        command = COMMANDS[sequence]
        self.send(Envelope(generation=generation, sequence=sequence, command=command))

    def close(self):
        self.socket.close(linger=0)
        self.context.term()


@pytest.fixture
def coordinator():
    coordinator = Coordinator()
    yield coordinator
    coordinator.close()


@pytest.fixture
def inbox(coordinator):
    with closing(Inbox(coordinator.address, process=1, generation=GENERATION, keys=KEYS)) as inbox:
        yield inbox


@pytest.fixture
def welcome(coordinator, inbox):
    """The inbox of a worker whose Hello has been answered."""
    inbox.report(Hello)
    coordinator.receive()
    coordinator.send(setup())
    assert inbox.hello(SECONDS) == setup()
    coordinator.receive()
    return inbox


def test_hello_names_the_worker_and_brings_the_setup(coordinator, inbox):
    inbox.report(Hello)
    assert coordinator.receive() == Hello(generation=GENERATION, process=1)
    coordinator.send(setup())
    assert inbox.hello(SECONDS) == setup()


def test_process_0_says_where_jax_may_listen(coordinator, inbox):
    with pytest.raises(MeshError):
        inbox.hello(0.01, jax_port=1234)
    assert coordinator.receive() == Hello(generation=GENERATION, process=1, jax_port=1234)


def test_another_secret_gets_no_answer(coordinator):
    stranger = Keys.of("another secret of this test")
    with closing(Inbox(coordinator.address, process=1, generation=GENERATION, keys=stranger)) as inbox:
        with pytest.raises(MeshError):
            inbox.hello(0.3)
        assert coordinator.socket.poll(0) == 0


def test_the_setup_of_another_generation_is_not_taken(coordinator, inbox):
    inbox.report(Hello)
    coordinator.receive()
    coordinator.send(setup(generation=2))
    coordinator.send(setup())
    assert inbox.hello(SECONDS) == setup()


def test_a_coordinator_that_does_not_answer_is_an_error(inbox):
    with pytest.raises(MeshError, match=r"did not answer within 0\.01 s.* worker 1 of generation 3"):
        inbox.hello(0.01)


def test_commands_come_in_their_order(coordinator, welcome):
    for sequence in range(3):
        coordinator.command(sequence)
    assert [welcome.next().command for _ in range(3)] == COMMANDS[:3]


def test_nothing_is_there_until_it_was_sent(coordinator, welcome):
    assert welcome.next_if_there() is None
    coordinator.command(0)
    coordinator.command(1)
    assert welcome.next().sequence == 0
    while (envelope := welcome.next_if_there()) is None:
        pass
    assert envelope.sequence == 1
    assert welcome.next_if_there() is None


@pytest.mark.parametrize("sent, expected, received", [([1], 0, 1), ([0, 2], 1, 2), ([0, 0], 1, 0)])
def test_a_gap_or_repetition_is_an_error(coordinator, welcome, sent, expected, received):
    for sequence in sent:
        coordinator.command(sequence)
    for _ in sent[:-1]:
        welcome.next()
    with pytest.raises(CommandGap, match=f"expected command {expected}, received {received}"):
        welcome.next()


def test_commands_of_another_generation_are_ignored(coordinator, welcome):
    coordinator.command(0, generation=2)
    coordinator.command(4, generation=4)
    coordinator.command(0)
    assert welcome.next().generation == GENERATION


def test_reports_carry_who_sent_them(coordinator, welcome):
    welcome.report(Ready, plan=PLAN, device="1 x fake")
    assert coordinator.receive() == Ready(generation=GENERATION, process=1, plan=PLAN, device="1 x fake")


def test_a_worker_beats_with_what_it_carries_out_until_it_ends(coordinator, inbox, monkeypatch):
    monkeypatch.setattr("spmd_tx.worker.heartbeat.BEAT_SECONDS", 0.01)
    with Heartbeat(inbox):
        assert coordinator.receive() == Beat(generation=GENERATION, process=1, sequence=None)
        inbox.executing = 7
        while coordinator.receive().sequence != 7:
            pass


def test_a_coordinator_that_goes_away_is_an_error(coordinator, welcome):
    coordinator.socket.close(linger=0)
    with pytest.raises(MeshError, match="worker 1 of generation 3 has lost the coordinator"):
        welcome.next()


def test_commands_sent_before_the_coordinator_went_away_are_still_there(coordinator, welcome):
    coordinator.command(0)
    coordinator.send(Envelope(generation=GENERATION, sequence=1, command=Shutdown()))
    coordinator.socket.close(linger=int(1000 * SECONDS))
    assert welcome.next().sequence == 0
    assert welcome.next().command == Shutdown()


def test_the_last_report_arrives_although_the_inbox_closes(coordinator):
    with closing(Inbox(coordinator.address, process=1, generation=GENERATION, keys=KEYS)) as inbox:
        inbox.report(Hello)
    assert coordinator.receive() == Hello(generation=GENERATION, process=1)


def test_a_report_aside_arrives_although_the_coordinator_is_slow_to_greet(monkeypatch):
    """Its connection is closed long before; what is left unsent then is not lost."""
    monkeypatch.setattr(inbox_module, "LINGER_MS", 0)
    early = Coordinator()
    address = early.address
    early.close()
    with closing(Inbox(address, process=1, generation=GENERATION, keys=KEYS)) as inbox:
        inbox.report_aside(Written, path="here")
        late = Coordinator(address)
        assert late.receive().path == "here"
        late.close()


def test_what_comes_first_ends_a_wait(coordinator, welcome):
    coordinator.command(0)
    with ResultSignal() as signal:
        envelope = welcome.next_unless(signal)
        assert envelope is not None
        assert envelope.sequence == 0
        signal.wait_for(({"tokens": jnp.ones(8)}, {}))
        assert welcome.next_unless(signal) is None
        coordinator.command(1)
        assert welcome.next().sequence == 1
