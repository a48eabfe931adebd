import itertools

import pytest

from spmd_tx.coordinator.lines import LATER_CALL_SECONDS, SILENCE_SECONDS, Line
from spmd_tx.coordinator.request_queue import Kind, Request
from spmd_tx.errors import InvalidRequest


def request(seq_id: int, kind: Kind = "forward_backward") -> Request:
    return Request(seq_id, f"request-{seq_id}", kind, "session:train:0", seq_id, "session")


def line_after_creation() -> Line:
    line = Line("session:train:0")
    line.arrive(request(0, "create_model"), now=0.0)
    assert numbers(line, now=0.0) == [0]
    return line


def numbers(line: Line, now: float) -> list[int]:
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
