import os
import re

import numpy as np
import pytest

from spmd_tx.coordinator.requests.sample_notes import NoteWriter
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.sampling.stability_notes import KEPT_SECONDS, StabilityFiles, encode
from spmd_tx.coordinator.wire.sampling_protobuf import SampledSequence
from spmd_tx.coordinator.wire.training_protobuf import Datum, TokenSpan
from spmd_tx.errors import DamagedBody, InvalidRequest

SESSION, REQUEST = "session:1", "abc123"
SAMPLES = [
    SampledSequence([5, 6, 7], [-0.5, -0.25, -1.0], "stop"),
    SampledSequence([8, 9], [-2.0, -3.0], "length"),
]


@pytest.fixture
def files(tmp_path):
    NoteWriter(tmp_path).write(SESSION, REQUEST, {"stability": encode(SAMPLES)})
    return StabilityFiles(tmp_path)


@pytest.fixture
def note(files, tmp_path):
    (path,) = (tmp_path / "stability").rglob("*.zst")
    return path


def sampled(place: int, offset: int, length: int, request: str = REQUEST) -> TokenSpan:
    return TokenSpan(f"{request}:{place}", True, offset, length)


def prompt(length: int) -> TokenSpan:
    return TokenSpan(f"{REQUEST}:0", False, 1, length)


def datum(
    targets: list[int], advantages: list[float], *spans: TokenSpan, problem: str | None = None
) -> Datum:
    inputs = {
        "target_tokens": np.array(targets),
        "advantages": np.array(advantages, np.float32),
        "logprobs": np.full(len(targets), -99, np.float32),  # of the client, which do not count
    }
    return Datum(np.array(targets, np.int32), inputs, target_spans=spans, span_problem=problem)


def recorded(files, each: Datum, session: str = SESSION, is_again: bool = False) -> list[float]:
    (resolved,) = files.resolved([session], [each], is_again=is_again)
    return resolved.loss_inputs["logprobs"].tolist()


GOOD = datum([0, 5, 6, 7], [0, 1, 1, 1], prompt(1), sampled(0, 0, 3))


def test_targets_that_were_sampled_get_the_probabilities_that_were_recorded(files):
    assert recorded(files, GOOD) == [0, -0.5, -0.25, -1.0]


def test_spans_of_several_turns_are_laid_end_to_end(files):
    turns = datum([0, 6, 7, 3, 8], [0, 1, -1, 0, 2], prompt(1), sampled(0, 1, 2), prompt(1), sampled(1, 0, 1))
    assert recorded(files, turns) == [0, -0.25, -1.0, 0, -2.0]


def test_what_has_no_advantage_needs_no_record(files):
    masked = datum([0, 4, 6, 7], [0, 0, 1, 1], prompt(1), sampled(0, 0, 3))
    assert recorded(files, masked) == [0, 0, -0.25, -1.0]
    unknown = datum([0, 4, 5], [0, 0, 1], sampled(0, 0, 2, request="unknown"), sampled(0, 0, 1))
    assert recorded(files, unknown) == [0, 0, -0.5]


@pytest.mark.parametrize(
    "wrong, message",
    [
        (datum([5], [1]), "it has no loss_fn_input_spans; stable_reinforce must know which samples"),
        (datum([5], [1], problem="its model_input_spans cover 2"), "its model_input_spans cover 2"),
        (datum([4, 5], [1, 1], prompt(1), sampled(0, 0, 1)), "position 0 has an advantage, and"),
        (datum([5], [1], sampled(0, 0, 1, request="gone")), "nothing is recorded of sequence 'gone:0' in"),
        (datum([5], [1], sampled(2, 0, 1)), f"nothing is recorded of sequence '{REQUEST}:2'"),
        (
            datum([5], [1], TokenSpan(f"{REQUEST}:{'9' * 5000}", True, 0, 1)),
            "nothing is recorded of sequence",
        ),
        (datum([5], [1], sampled(0, 0, 1, request="a" * 300)), "nothing is recorded of sequence"),
        (datum([5], [1], TokenSpan(REQUEST, True, 0, 1)), f"nothing is recorded of sequence '{REQUEST}'"),
        (
            datum([5], [1], TokenSpan(f"../{REQUEST}:0", True, 0, 1)),
            "record_stability_info=True, in the session",
        ),
        (datum([5, 6], [0, 1], sampled(1, 1, 2)), f"tokens 1 to 2 of sequence '{REQUEST}:1', which has 2"),
        (
            datum([5, 9, 7], [1, 1, 1], sampled(0, 0, 3)),
            f"has 9 at position 1, and token 1 of sequence '{REQUEST}:0', which loss_fn_input_spans names",
        ),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)  # fmt: skip
def test_targets_without_a_record_are_refused_with_a_remedy(files, wrong, message):
    with pytest.raises(InvalidRequest, match=f"^datum 1: .*{re.escape(message)}"):
        files.resolved([SESSION], [GOOD, wrong], is_again=False)


def test_another_session_finds_nothing(files):
    with pytest.raises(InvalidRequest, match="nothing is recorded"):
        recorded(files, GOOD, session="session:2")


def test_a_record_is_kept_for_a_day_after_it_was_last_used(files, note):
    def grow_old(seconds: float) -> None:
        os.utime(note, (then := clock.now() - seconds, then))

    for _ in range(3):
        grow_old(KEPT_SECONDS - 60)
        recorded(files, GOOD)
    grow_old(KEPT_SECONDS + 60)
    with pytest.raises(InvalidRequest, match=r"or not any more; sample with a client of .* with record_stab"):
        recorded(files, GOOD)


def test_a_request_that_is_run_again_finds_what_it_used_however_long_ago(files, note):
    expected = recorded(files, GOOD)
    os.utime(note, (0, 0))
    assert recorded(files, GOOD, is_again=True) == expected


def test_they_are_there_after_a_restart(files, tmp_path):
    assert recorded(StabilityFiles(tmp_path), GOOD) == [0, -0.5, -0.25, -1.0]


def test_a_damaged_record_is_named(files, note):
    note.write_bytes(note.read_bytes()[:-5])
    with pytest.raises(DamagedBody, match=f"{note}, which holds the probabilities of a sample, is damaged"):
        recorded(files, GOOD)
