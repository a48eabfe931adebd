import pytest

from spmd_tx.coordinator.mesh.loss_causes import Suspicion
from spmd_tx.coordinator.mesh.watchdog import HELLO_SECONDS, LONGEST_STEP, SILENT_SECONDS, Watchdog
from spmd_tx.protocol.reports import Beat, Progress

TIMEOUT = 10.0


def beat(worker, sequence=None):
    return Beat(generation=1, process=worker, sequence=sequence)


def progress(worker, message):
    return Progress(generation=1, process=worker, message=message)


@pytest.fixture
def watchdog():
    """Two workers, ready, with commands of 10 seconds at most."""
    watchdog = Watchdog(workers=2, command_timeout=TIMEOUT)
    for worker in range(2):
        watchdog.heard(beat(worker))
    watchdog.ready()
    return watchdog


def pass_time(watchdog, seconds, oldest=None, alive=(0, 1)):
    """The signs of so many seconds, in which some workers beat."""
    signs = []
    for _ in range(round(seconds)):
        signs += watchdog.passed(1.0, oldest)
        for worker in alive:
            watchdog.heard(beat(worker))
    return signs


def test_workers_that_beat_are_left_alone(watchdog):
    assert pass_time(watchdog, 1000) == []


def test_a_worker_that_is_silent_is_lost(watchdog):
    signs = pass_time(watchdog, SILENT_SECONDS + 1, alive=[0])
    assert [(sign.suspicion, sign.worker, sign.by_command) for sign in signs] == [
        (Suspicion.SILENT, 1, False)
    ]


def test_a_worker_that_starts_has_more_time(watchdog):
    watchdog = Watchdog(workers=1, command_timeout=10 * HELLO_SECONDS)
    assert pass_time(watchdog, HELLO_SECONDS, alive=[]) == []
    assert pass_time(watchdog, 1, alive=[])[0].suspicion == Suspicion.SILENT


def test_a_coordinator_that_slept_does_not_blame_its_workers(watchdog):
    assert watchdog.passed(3600.0, oldest=3) == []
    assert LONGEST_STEP < TIMEOUT


def test_a_command_past_its_deadline_is_named(watchdog):
    assert pass_time(watchdog, 1 + TIMEOUT, oldest=4) == []  # its time starts with the first look
    [sign] = pass_time(watchdog, 1, oldest=4)
    assert (sign.suspicion, sign.by_command, sign.sequence) == (Suspicion.LATE, True, 4)
    assert sign.text == "no reply to a command within --command-timeout 10 s"


def test_each_command_has_its_own_deadline(watchdog):
    for sequence in range(20):
        assert pass_time(watchdog, TIMEOUT - 1, oldest=sequence) == []
    assert pass_time(watchdog, TIMEOUT, oldest=None) == []
    assert pass_time(watchdog, TIMEOUT, oldest=19) == []


def test_a_command_has_no_more_time_because_something_is_compiled(watchdog):
    watchdog.heard(progress(1, "compiling decode 4x16"))
    assert pass_time(watchdog, 1 + TIMEOUT, oldest=4) == []
    assert pass_time(watchdog, 1, oldest=4) != []


def test_a_program_past_its_deadline_is_named_and_no_command_is_blamed(watchdog):
    def compile_for(seconds, number, program):
        signs = []
        for _ in range(round(seconds)):
            signs += watchdog.passed(1.0, None, {number: program})
            for worker in range(2):
                watchdog.heard(beat(worker))
        return signs

    assert compile_for(1 + TIMEOUT, 1, "decode 4x16x1") == []
    assert compile_for(1 + TIMEOUT, 2, "forward 1x64") == []  # each has its own time
    signs = compile_for(1, 2, "forward 1x64")
    assert [(sign.suspicion, sign.by_command, sign.orders) for sign in signs] == [(Suspicion.LATE, True, [2])]
    assert signs[0].text == "forward 1x64 was not compiled within --command-timeout 10 s"


def test_workers_that_do_not_get_ready_are_late():
    watchdog = Watchdog(workers=1, command_timeout=TIMEOUT)
    for percent in range(5):
        assert pass_time(watchdog, TIMEOUT, alive=[0]) == []
        watchdog.heard(progress(0, f"loading weights {percent} %"))
    [sign] = pass_time(watchdog, TIMEOUT + 1, alive=[0])
    assert sign.text == "the workers did not get ready within --command-timeout 10 s"
    assert not sign.by_command
