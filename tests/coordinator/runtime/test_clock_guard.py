import logging

import pytest

from spmd_tx.coordinator.runtime.clock_guard import BELIEVED_SECONDS, FILE, ClockGuard, ClockState, look

HOUR = 3600.0
DAY = 24 * HOUR
NOON = 1_800_000_000.0


class Machine:
    """Its clocks, and a server on it that may be started again."""

    def __init__(self, data_dir):
        self.data_dir, self.wall, self.steady = data_dir, NOON, 0.0
        self.start()

    def start(self):
        self.guard = ClockGuard(self.data_dir, lambda: self.wall, lambda: self.steady)
        return self.guard.for_deletions()

    def stop_for(self, seconds):
        self.wall += seconds
        self.steady += seconds
        return self.start()

    def run(self, seconds):
        """With a look every half hour."""
        believed = 0.0
        for _ in range(round(seconds / (HOUR / 2))):
            self.wall += HOUR / 2
            self.steady += HOUR / 2
            believed = self.guard.for_deletions()
        return believed


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_a_clock_that_runs_is_believed(machine):
    assert machine.run(30 * DAY) == machine.wall


def test_small_steps_are_followed(machine):
    machine.wall += HOUR / 2
    assert machine.run(HOUR) == machine.wall


@pytest.mark.parametrize("jump", [10 * 365 * DAY, 2 * HOUR])
def test_a_clock_that_is_set_ahead_makes_nothing_old_until_it_has_run_evenly_for_hours(machine, jump):
    machine.run(DAY)
    machine.wall += jump
    assert machine.run(BELIEVED_SECONDS) == machine.wall - jump
    assert machine.run(HOUR) == machine.wall


def test_a_clock_that_is_set_back_makes_nothing_old(machine):
    machine.wall -= 30 * DAY
    assert machine.run(HOUR) == machine.wall
    machine.wall += 30 * DAY
    assert machine.run(HOUR) == machine.wall


def test_a_clock_that_comes_back_is_believed_at_once(machine):
    machine.wall += 30 * DAY
    machine.run(HOUR)
    machine.wall -= 30 * DAY
    assert machine.run(HOUR) == machine.wall


def test_a_clock_that_jumps_again_is_not_believed_sooner(machine):
    machine.wall += 30 * DAY
    machine.run(BELIEVED_SECONDS - HOUR)
    machine.wall += 30 * DAY
    assert machine.run(BELIEVED_SECONDS) == machine.wall - 60 * DAY


def test_a_clock_that_is_wrong_at_a_start_makes_nothing_old(machine):
    machine.run(DAY)
    machine.wall += 365 * DAY
    assert machine.start() == machine.wall - 365 * DAY


def test_after_a_short_stop_the_clock_is_believed(machine):
    assert machine.stop_for(HOUR / 2) == machine.wall


def test_after_a_long_stop_it_is_believed_hours_later(machine):
    assert machine.stop_for(7 * DAY) == machine.wall - 7 * DAY
    assert machine.run(BELIEVED_SECONDS + HOUR) == machine.wall


def test_starts_in_short_succession_do_not_put_off_belief_for_ever(machine):
    machine.stop_for(7 * DAY)
    for _ in range(8):
        machine.run(HOUR)
        machine.stop_for(HOUR / 4)
    assert machine.run(HOUR) == machine.wall


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"wall": "x"}'])
def test_a_damaged_note_is_like_none(machine, content):
    (machine.data_dir / FILE).write_bytes(content)
    assert machine.start() == machine.wall


def test_a_jump_is_told_once_with_both_times(machine, caplog):
    machine.wall += 365 * DAY
    with caplog.at_level(logging.ERROR):
        machine.run(2 * HOUR)
    (record,) = caplog.records
    assert "shows 2028-01-15" in record.getMessage()
    assert "where 2027-01-15" in record.getMessage()


def test_the_time_for_deletions_is_the_earlier_one():
    doubted = look(ClockState(wall=NOON, believed=NOON), NOON - DAY, 60.0)
    assert doubted.for_deletions == NOON - DAY
