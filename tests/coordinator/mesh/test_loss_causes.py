import signal

import pytest

from spmd_tx.coordinator.agent.worker_process import WorkerExit
from spmd_tx.coordinator.mesh.loss_causes import (
    GenerationLoss,
    Suspicion,
    cause,
    of_agent,
    of_exit,
    of_failure,
)
from spmd_tx.protocol.reports import Failure


def ended(worker, code, *lines):
    return of_exit(WorkerExit(worker, code, lines), "node-b")


def failed(worker, message, **fields):
    failure = Failure(generation=1, process=worker, message=message, traceback="", **fields)
    return of_failure(failure, "node-b")


KILLED = ended(1, -signal.SIGKILL)
STARVED = of_exit(WorkerExit(1, -signal.SIGKILL, is_out_of_memory=True), "node-b")
CRASHED = ended(1, -signal.SIGSEGV)
ABORTED = ended(0, -signal.SIGABRT)
LEFT_ALONE = ended(
    0, -signal.SIGABRT, "Terminating because the JAX distributed service detected fatal errors."
)
EXITED = ended(1, 1)
RAISED = failed(1, "ValueError: boom", sequence=7)
FOLLOWED = failed(0, "Gloo: Connection closed by peer", is_consequence=True)
VANISHED = of_agent(1, "node-b", "has lost its connection")


@pytest.mark.parametrize(
    "signs, expected",
    [
        ([FOLLOWED, ABORTED, KILLED], KILLED),
        ([FOLLOWED, ABORTED, STARVED], STARVED),
        ([FOLLOWED, RAISED, EXITED], RAISED),
        ([ABORTED, VANISHED], VANISHED),
        ([FOLLOWED, EXITED], EXITED),
        ([FOLLOWED], FOLLOWED),
        ([LEFT_ALONE, EXITED], EXITED),
        ([RAISED, failed(0, "ValueError: boom, too")], RAISED),
    ],
)
def test_the_cause_is_told_from_what_follows(signs, expected):
    assert cause(signs) is expected


@pytest.mark.parametrize(
    "sign, by_command",
    [
        (KILLED, False),
        (ended(1, -signal.SIGTERM), False),
        (STARVED, True),
        (of_exit(WorkerExit(1, -signal.SIGTERM, is_out_of_memory=True), "node-b"), False),
        (CRASHED, True),
        (ABORTED, True),
        (LEFT_ALONE, False),
        (EXITED, True),
        (ended(1, 0), False),
        (RAISED, True),
        (FOLLOWED, False),
        (VANISHED, False),
    ],
)
def test_a_command_is_blamed_only_for_what_it_may_have_done(sign, by_command):
    assert sign.by_command == by_command


def test_a_sign_names_worker_host_and_what_happened():
    assert KILLED.text == "worker 1 on node-b was killed by signal 9 (SIGKILL)"
    assert "SIGKILL): its host or container has no memory left" in STARVED.text
    assert EXITED.text == "worker 1 on node-b exited with code 1"
    assert RAISED.text == "worker 1 on node-b failed: ValueError: boom"
    assert VANISHED.text == "the agent of worker 1 on node-b has lost its connection"
    assert RAISED.sequence == 7


def test_the_story_quotes_the_last_words():
    loss = GenerationLoss(ended(1, 1, "loading", "no memory"), "worker 1 on node-b exited with code 1")
    assert loss.story == "worker 1 on node-b exited with code 1; its last words: loading | no memory"
    assert GenerationLoss(KILLED, KILLED.text).story == KILLED.text


def test_only_a_failure_that_says_so_is_final():
    assert failed(0, "the mesh needs 8 devices", is_final=True).is_final
    assert not RAISED.is_final
    assert RAISED.suspicion < Suspicion.FOLLOWED


def test_a_device_without_memory_is_told_with_the_options_to_lower():
    failure = Failure(
        generation=1, process=0, message="XlaRuntimeError: RESOURCE_EXHAUSTED: 2.1G", traceback=""
    )
    assert "no memory left: lower --train-tokens" in of_failure(failure, "node-b").text
