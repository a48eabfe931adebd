"""A process stands back while commands run, and gets its share all the same."""

import threading
from queue import SimpleQueue

import pytest

from spmd_tx.worker.programs import pacer
from spmd_tx.worker.programs.pacer import Pacer

SECONDS = 60


class Recorded:
    """Keeps what it is told, without repetitions."""

    def __init__(self) -> None:
        self.turns: SimpleQueue[str] = SimpleQueue()
        self._last = "resume"
        self._lock = threading.Lock()

    def pause(self) -> None:
        self._put("pause")

    def resume(self) -> None:
        self._put("resume")

    def _put(self, turn: str) -> None:
        with self._lock:
            if turn != self._last:
                self.turns.put(turn)
            self._last = turn

    def next(self) -> str:
        return self.turns.get(timeout=SECONDS)


@pytest.fixture
def paced(monkeypatch):
    monkeypatch.setattr(pacer, "TICK_SECONDS", 0.001)
    pacing, process = Pacer(), Recorded()
    pacing.take(process)
    yield pacing, process
    pacing.drop()


def test_it_has_turns_while_commands_run(paced):
    pacing, process = paced
    pacing.at_work(True)
    assert [process.next() for _ in range(6)] == ["pause", "resume"] * 3


def test_it_does_not_stand_back_while_it_is_hurried(paced, monkeypatch):
    monkeypatch.setattr(pacer, "SHARE", 1 << 30)  # no turn comes
    pacing, process = paced
    pacing.at_work(True)
    assert process.next() == "pause"
    pacing.hurry(True)
    assert process.next() == "resume"
    pacing.hurry(False)
    assert process.next() == "pause"


def test_it_runs_when_there_are_no_more_commands(paced, monkeypatch):
    monkeypatch.setattr(pacer, "SHARE", 1 << 30)  # no turn comes
    pacing, process = paced
    pacing.at_work(True)
    assert process.next() == "pause"
    pacing.at_work(False)
    assert process.next() == "resume"


def test_a_command_stops_it_at_once(monkeypatch):
    monkeypatch.setattr(pacer, "TICK_SECONDS", 3600)
    pacing, process = Pacer(), Recorded()
    pacing.take(process)
    pacing.at_work(True)
    assert process.turns.get_nowait() == "pause"


def test_it_is_left_alone_after_it_was_dropped(monkeypatch):
    monkeypatch.setattr(pacer, "TICK_SECONDS", 0.001)
    pacing, first, second = Pacer(), Recorded(), Recorded()
    pacing.take(first)
    pacing.drop()
    pacing.take(second)
    pacing.at_work(True)
    assert second.next() == "pause"
    assert second.next() == "resume"
    assert first.turns.empty()
