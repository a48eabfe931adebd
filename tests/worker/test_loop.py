import typing

import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from spmd_tx.errors import DamagedWeights, ForeignWeights
from spmd_tx.protocol import agents, commands, encoding
from spmd_tx.protocol.commands import (
    Compile,
    CustomLoss,
    Decode,
    DimuonStep,
    Drop,
    EncodeImages,
    Forward,
    ForwardBackward,
    LossInputs,
    Move,
    OptimStep,
    PackedRows,
    Prefill,
    Shutdown,
)
from spmd_tx.protocol.envelope import Envelope
from spmd_tx.protocol.places import PAIRS, Idle
from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.protocol.reports import Reply
from spmd_tx.worker import loop as loop_module
from spmd_tx.worker.loop import Loop, is_dispatched
from tests.support import moves

ROWS = PackedRows(**dict.fromkeys(PackedRows.__struct_fields__, np.zeros((1, 1), np.int32)))
LOSS = LossInputs(**dict.fromkeys(LossInputs.__struct_fields__, np.zeros((1, 1), np.float32)))
OPTIM_STEP = OptimStep(
    slot=0, learning_rate=0.1, beta1=0.9, beta2=0.9, eps=0.1, weight_decay=0.0, grad_clip_norm=0.0
)
DECODE = Decode(
    steps=1,
    **dict.fromkeys(
        [
            field.name
            for field in msgspec.structs.fields(Decode)
            if field.required and field.type is np.ndarray
        ],
        np.zeros((1, 1), np.int32),
    ),
)
MOVES = [
    moves.create_adapter(),
    moves.save_sampler(slot=0, bank=1, path="/x"),
    moves.save_sampler(slot=0, bank=None, path="/x"),
    moves.swap_out(0, "x"),
    moves.swap_in(0, "x"),
    moves.page_out(1, "x"),
    moves.page_in(1, "x"),
    moves.save_state(0, "/x"),
    moves.load_state(0, "/x", optimizer=True),
    moves.write_sampler(1, "/x"),
    moves.load_sampler(1, "/x"),
]
EXAMPLES = {
    **{move.name: move for move in MOVES},
    "snapshot": moves.snapshot(0, "/x"),
    "drop": Drop(places=[Idle("x")]),
    "forward_backward": ForwardBackward(rows=ROWS, loss=LOSS),
    "forward": Forward(rows=ROWS, loss=LOSS),
    "custom_loss": CustomLoss(
        number=1, tenant="a", definition=b"", lengths=ROWS.slots, widths=ROWS.slots, values=[LOSS.weights]
    ),
    "optim_step": OPTIM_STEP,
    "dimuon_step": DimuonStep(slot=0, rank=1, learning_rate=0.1, beta1=0.9, grad_clip_norm=0.0),
    "compile": Compile(number=3, program=ProgramShape(step="decode", rows=1, active=1), lane=0),
    "encode_images": EncodeImages(patches=ROWS.tokens, grids=ROWS.tokens, rows=ROWS.tokens),
    "prefill": Prefill(rows=ROWS, pages=ROWS.tokens, copies=ROWS.tokens, logprobs=False),
    "decode": DECODE,
}


class RecordingEngine:
    """Writes down every command, and answers with its number."""

    def __init__(self, log):
        self.log = log
        self.count = 0

    def execute(self, command):
        if isinstance(command, Shutdown):
            return {}, {}
        self.count += 1
        self.log.append(f"run {command.name}")
        return {"number": jnp.full(3, self.count, jnp.int32)}, {"grad_norm": jnp.float32(0.5)}


class ScriptedInbox:
    """Commands that arrive in batches: a batch is there when all of the one before were replied to."""

    def __init__(self, batches, log):
        self.executing = None
        self.waiting = []
        self.batches = [list(batch) for batch in batches]
        self.log = log
        self.sequence = 0
        self.replies = []

    def next(self):
        assert len(self.replies) == self.sequence, "waits for a command and owes a reply"
        if not self.waiting:
            self.waiting = self.batches.pop(0)
        return self.next_if_there()

    def next_if_there(self):
        if not self.waiting:
            return None
        envelope = Envelope(generation=1, sequence=self.sequence, command=self.waiting.pop(0))
        self.sequence += 1
        return envelope

    def next_unless(self, signal):
        """A result is complete before the next batch comes."""
        return None

    def report(self, kind, **fields):
        assert kind is Reply
        reply = Reply(generation=1, process=0, **fields)
        self.log.append(f"reply {reply.sequence}")
        self.replies.append(reply)


def run(*batches, is_leader=True, at_work=lambda is_at_work: None):
    log = []
    inbox = ScriptedInbox([*batches, [Shutdown()]], log)
    Loop(RecordingEngine(log).execute, inbox, is_leader, at_work).run()
    return inbox.replies, log


def test_every_command_has_an_example():
    assert {type(command) for command in EXAMPLES.values()} | {Shutdown} == set(
        typing.get_args(commands.AnyCommand)
    )


def test_every_pair_of_places_has_an_example():
    assert [(type(move.source), type(move.target)) for move in MOVES] == list(PAIRS)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_command_has_its_name_and_is_the_same_after_a_message(name):
    command = EXAMPLES[name]
    assert command.name == name
    envelope = Envelope(generation=1, sequence=0, command=command)
    read = encoding.decode_to_worker(encoding.encode(envelope)).command
    assert type(read) is type(command)
    assert read == command or not isinstance(command, Move | Drop)


def test_these_commands_wait_for_disks_or_other_processes_and_no_others_do():
    waiting = {name for name, command in EXAMPLES.items() if not is_dispatched(command)}
    assert waiting == {
        *("create_adapter", "save_state", "snapshot", "load_state", "load_sampler", "drop", "custom_loss")
    }


def test_replies_are_plain_arrays_and_numbers_in_the_order_of_the_commands():
    replies, _ = run([EXAMPLES["decode"], OPTIM_STEP], [EXAMPLES["forward"]])
    assert [reply.sequence for reply in replies] == [0, 1, 2, 3]
    assert [reply.arrays["number"].tolist() for reply in replies[:3]] == [[n, n, n] for n in (1, 2, 3)]
    assert {type(reply.arrays["number"]) for reply in replies[:3]} == {np.ndarray}
    assert replies[1].metrics == {"grad_norm": 0.5}
    assert agents.decode_any_report(encoding.encode(replies[1])).metrics == {"grad_norm": 0.5}


def test_the_next_command_is_dispatched_before_a_result_is_fetched():
    _, log = run([DECODE, DECODE, DECODE])
    assert log == "run decode,run decode,reply 0,run decode,reply 1,reply 2,reply 3".split(",")


def test_it_says_when_commands_run_and_when_none_is_left():
    told = []
    run([DECODE, DECODE], [EXAMPLES["compile"]], [DECODE], at_work=told.append)
    assert told == [False, True, False, False, False, True, False, True]


def test_a_result_does_not_wait_for_a_command_that_is_not_there():
    _, log = run([DECODE], [DECODE])
    assert log == "run decode,reply 0,run decode,reply 1,reply 2".split(",")


class SlowDevice(ScriptedInbox):
    """Every batch comes while the last command of the one before is computed."""

    def next_unless(self, signal):
        self.log.append(f"wait for {self.executing}")
        self.waiting = self.batches.pop(0)
        return self.next_if_there()


def test_a_command_that_comes_while_a_result_is_computed_is_dispatched_at_once(monkeypatch):
    monkeypatch.setattr(loop_module, "is_complete", lambda result: False)
    inbox = SlowDevice([[DECODE], [DECODE], [EXAMPLES["save_state"]], [Shutdown()]], log := [])
    Loop(RecordingEngine(log).execute, inbox, True, lambda is_at_work: None).run()
    first, second = "run decode,wait for 0,run decode,reply 0,wait for 1", "reply 1,run save_state,wait for 2"
    assert log == f"{first},{second},reply 2,reply 3".split(",")


def test_a_result_does_not_wait_for_a_command_that_writes_to_disk():
    _, log = run([DECODE, EXAMPLES["save_state"]])
    assert log == "run decode,reply 0,run save_state,reply 1,reply 2".split(",")


def test_only_the_leader_sends_arrays():
    replies, _ = run([DECODE, OPTIM_STEP], is_leader=False)
    assert [(reply.sequence, reply.arrays, reply.metrics) for reply in replies] == [
        (0, {}, {}),
        (1, {}, {}),
        (2, {}, {}),
    ]


@pytest.mark.parametrize("is_leader", [True, False])
@pytest.mark.parametrize("problem", [ForeignWeights, DamagedWeights])
def test_a_load_that_is_refused_is_answered_by_all_and_the_next_command_runs(is_leader, problem):
    engine = RecordingEngine([])

    def execute(command):
        if command.name == "load_sampler":
            raise problem("/x cannot be used")
        return engine.execute(command)

    inbox = ScriptedInbox([[DECODE, EXAMPLES["load_sampler"], DECODE], [Shutdown()]], [])
    Loop(execute, inbox, is_leader, lambda is_at_work: None).run()
    assert [reply.refusal for reply in inbox.replies] == [None, "/x cannot be used", None, None]
    assert inbox.replies[1].is_damage == (problem is DamagedWeights)
    assert engine.log == ["run decode", "run decode"]
