import itertools
import sys

import pytest

from spmd_tx.coordinator.requests.records import Request, RequestKind
from spmd_tx.coordinator.training.line import (
    LATER_CALL_SECONDS,
    MOST_CONSUMED,
    SILENCE_SECONDS,
    ModelLine,
    RequestLine,
    Restoration,
    WaitingLines,
)
from spmd_tx.errors import InvalidRequest


def request(seq_id: int, kind: RequestKind = "forward_backward") -> Request:
    return Request(seq_id, f"request-{seq_id}", kind, "session:train:0", seq_id, "session")


def line_after_creation() -> RequestLine:
    line = RequestLine("session:train:0")
    line.arrive(request(0, "create_model"), now=0.0)
    assert numbers(line, now=0.0) == [0]
    return line


def numbers(line: RequestLine, now: float) -> list[int]:
    return [request.seq_id for request in line.release(now)]


@pytest.mark.parametrize("arrivals", list(itertools.permutations([1, 2, 3, 4])))
def test_requests_come_out_in_seq_order_whatever_the_order_of_arrival(arrivals):
    line = line_after_creation()
    released = []
    for seq_id in arrivals:
        line.arrive(request(seq_id), now=1.0)
        released += numbers(line, now=1.0)
    assert released == [1, 2, 3, 4]


def test_nothing_passes_a_missing_request():
    line = line_after_creation()
    line.arrive(request(2), now=1.0)
    line.arrive(request(3, "optim_step"), now=1.0)
    assert numbers(line, now=1.0) == []
    assert line.missing == 1


def test_a_refused_number_is_no_gap():
    line = line_after_creation()
    line.arrive(request(3), now=1.0)
    line.consume(1)
    line.consume(2)
    assert numbers(line, now=1.0) == [3]


def test_a_number_refused_before_anything_waits_is_no_gap_later():
    line = line_after_creation()
    line.consume(1)
    assert numbers(line, now=1.0) == []
    line.arrive(request(2), now=5.0)
    assert numbers(line, now=5.0) == [2]


def test_a_gap_closes_soon_after_a_later_call_has_arrived():
    line = line_after_creation()
    line.arrive(request(2, "optim_step"), now=1.0)
    line.arrive(request(3), now=2.5)
    assert line.wake_at() == 1.0 + LATER_CALL_SECONDS
    assert numbers(line, now=1.0 + LATER_CALL_SECONDS - 0.01) == []
    assert numbers(line, now=1.0 + LATER_CALL_SECONDS) == [2, 3]
    assert line.wake_at() is None


def test_a_gap_among_chunks_stays_open_until_there_has_been_silence():
    line = line_after_creation()
    line.arrive(request(3), now=1.0)
    line.arrive(request(2), now=30.0)
    assert line.wake_at() == 30.0 + SILENCE_SECONDS
    assert numbers(line, now=60.0) == []
    assert numbers(line, now=30.0 + SILENCE_SECONDS) == [2, 3]


def test_a_gap_between_two_calls_of_chunks_and_an_optimizer_step_closes_wherever_it_lies():
    line = line_after_creation()
    line.arrive(request(2), now=1.0)
    line.arrive(request(4), now=1.0)
    line.arrive(request(6, "save_weights"), now=1.0)
    assert numbers(line, now=1.0 + LATER_CALL_SECONDS) == [2, 4, 6]


def test_a_request_that_comes_after_its_gap_was_closed_is_refused():
    line = line_after_creation()
    line.arrive(request(2, "optim_step"), now=1.0)
    line.release(now=1.0 + LATER_CALL_SECONDS)
    with pytest.raises(
        InvalidRequest, match=r"request 1 of session:train:0 came after .* gone on to request 3"
    ):
        line.arrive(request(1), now=9.0)
    line.arrive(request(3), now=9.0)
    assert numbers(line, now=9.0) == [3]


@pytest.fixture
def lines_of_code():
    """Counts the lines of Python that a block goes through, and ends it when they are too many."""

    class Counted:
        def __init__(self, most):
            self.most = self.left = most

        def __enter__(self):
            self.before = sys.gettrace()
            sys.settrace(self._count)
            sys._getframe(1).f_trace = self._count

        def __exit__(self, *_):
            sys.settrace(self.before)

        def _count(self, frame, event, arg):
            self.left -= event == "line"
            assert self.left > 0, f"more than {self.most} lines"
            return self._count

    return Counted


FARTHEST = 2**63 - 1


def test_the_widest_gap_is_one_jump(lines_of_code):
    line = line_after_creation()
    line.arrive(request(FARTHEST, "optim_step"), now=1.0)
    line.consume(7)
    with lines_of_code(200):
        assert numbers(line, now=1.0 + LATER_CALL_SECONDS) == [FARTHEST]
    with pytest.raises(InvalidRequest, match="gone on to request"):
        line.arrive(request(8), now=9.0)


def test_refused_numbers_below_a_jump_are_forgotten_and_those_above_are_not():
    line = line_after_creation()
    for seq_id in (3, 4, 6):
        line.consume(seq_id)
    line.arrive(request(5, "optim_step"), now=1.0)
    assert numbers(line, now=1.0 + LATER_CALL_SECONDS) == [5]
    line.arrive(request(7), now=9.0)
    assert numbers(line, now=9.0) == [7]


def test_only_so_many_refused_numbers_are_remembered():
    line = line_after_creation()
    for seq_id in range(2, MOST_CONSUMED + 10):
        line.consume(seq_id)
    line.arrive(request(MOST_CONSUMED + 10, "optim_step"), now=1.0)
    line.arrive(request(1), now=1.0)
    assert numbers(line, now=1.0) == [1]
    assert line.missing == MOST_CONSUMED + 2
    assert numbers(line, now=1.0 + LATER_CALL_SECONDS) == [MOST_CONSUMED + 10]


def test_a_line_where_many_wait_is_looked_at_as_fast_as_one_where_few_do(lines_of_code):
    line = line_after_creation()
    for seq_id in range(2, 12_000):
        line.arrive(request(seq_id, "optim_step"), now=1.0)
    with lines_of_code(100):
        assert numbers(line, now=1.0) == []
        assert line.wake_at() == 1.0 + LATER_CALL_SECONDS


def waiting_line(lines: WaitingLines, name: str, *arrivals: Request, now: float) -> ModelLine:
    entry = ModelLine(Restoration(name, "session"), "tenant", on_step=lambda: None)
    for arrival in arrivals:
        entry.line.arrive(arrival, now)
    lines.add(entry)
    return entry


def turns(entry):
    return [entry.turn.get_nowait().seq_id for _ in range(entry.turn.qsize())]


def test_lines_that_only_wait_cost_the_others_nothing(lines_of_code):
    lines = WaitingLines()
    for number in range(2_000):
        waiting_line(lines, f"waiting-{number}", request(1, "optim_step"), now=1.0)
    assert lines.release(now=1.0) == 1.0 + LATER_CALL_SECONDS
    with lines_of_code(200):
        entry = waiting_line(lines, "busy", request(0, "create_model"), now=1.5)
        assert lines.release(now=1.5) == 1.0 + LATER_CALL_SECONDS
    assert turns(entry) == [0]


def test_each_line_moves_on_when_its_gap_is_closed():
    lines = WaitingLines()
    soon = waiting_line(lines, "soon", request(1, "optim_step"), now=1.0)
    later = waiting_line(lines, "later", request(1, "optim_step"), now=2.0)
    filled = waiting_line(lines, "filled", request(1, "optim_step"), now=1.5)
    assert lines.release(now=2.0) == 1.0 + LATER_CALL_SECONDS
    filled.line.arrive(request(0, "create_model"), now=2.1)
    lines.add(filled)
    assert lines.release(now=1.0 + LATER_CALL_SECONDS) == 2.0 + LATER_CALL_SECONDS
    assert (turns(soon), turns(later), turns(filled)) == ([1], [], [0, 1])
    assert lines.release(now=2.0 + LATER_CALL_SECONDS) is None
    assert turns(later) == [1]


def test_a_line_that_is_given_up_is_not_moved_on():
    lines = WaitingLines()
    ended = waiting_line(lines, "ended", request(1, "optim_step"), now=1.0)
    lines.release(now=1.0)
    lines.discard(ended)
    assert lines.release(now=1.0 + LATER_CALL_SECONDS) is None
    assert turns(ended) == []


def test_a_new_arrival_moves_the_alarm_of_a_line_of_chunks():
    lines = WaitingLines()
    entry = waiting_line(lines, "chunks", request(2), now=1.0)
    assert lines.release(now=1.0) == 1.0 + SILENCE_SECONDS
    entry.line.arrive(request(3), now=30.0)
    lines.add(entry)
    assert lines.release(now=30.0) == 30.0 + SILENCE_SECONDS
    assert lines.release(now=1.0 + SILENCE_SECONDS) == 30.0 + SILENCE_SECONDS
    assert lines.release(now=30.0 + SILENCE_SECONDS) is None
    assert turns(entry) == [2, 3]
