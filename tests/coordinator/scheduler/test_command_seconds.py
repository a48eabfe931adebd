import pytest

from spmd_tx.coordinator.scheduler.command_seconds import CommandSeconds, CommandWork, work_of
from spmd_tx.protocol.commands import Drop
from tests.coordinator.scheduler.fake_sampling import decode


def test_nothing_is_known_of_a_step_that_was_never_taken():
    seconds = CommandSeconds()
    seconds.learn(CommandWork("forward", (64,), units=4, tokens=256), 1.0)
    assert seconds.estimate(CommandWork("decode", (64, 4), units=8, tokens=8)) is None


def test_a_program_is_known_by_the_time_of_its_rows():
    seconds = CommandSeconds()
    seconds.learn(CommandWork("forward", (64,), units=4, tokens=256), 1.0)
    seconds.learn(CommandWork("forward", (8192,), units=1, tokens=8192), 9.0)
    assert seconds.estimate(CommandWork("forward", (64,), units=8, tokens=512)) == 2.0


def test_a_new_program_is_thought_to_take_as_long_for_a_token_as_others_of_its_step():
    seconds = CommandSeconds()
    seconds.learn(CommandWork("forward", (64,), units=4, tokens=256), 1.0)
    assert seconds.estimate(CommandWork("forward", (256,), units=1, tokens=256)) == 1.0


def test_the_last_commands_count_most():
    seconds, work = CommandSeconds(), CommandWork("optim_step", (), units=1, tokens=1)
    for each in (8.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0):
        seconds.learn(work, each)
    assert seconds.estimate(work) == pytest.approx(1.0, abs=0.8)


def test_a_decode_is_counted_in_steps_whatever_its_rows():
    one, many = work_of(decode(1)), work_of(decode(1024))
    assert (one.units, many.units) == (8, 8)
    assert one.sizes != many.sizes
    assert work_of(Drop(places=[])) == CommandWork("drop", (), 1, 1)
