import pytest

from spmd_tx.coordinator.http.console import time_words

NOTHING = dict.fromkeys(time_words.DOING, 0.0)


@pytest.mark.parametrize(
    "seconds, sentence",
    [
        (
            {"client": 51.0, "device": 49.0},
            "The run spent most of this time waiting for its client (51 %), then computing (49 %).",
        ),
        (
            {"client": 40.0, "device": 35.0, "queue": 25.0},
            "The run spent the largest part of this time waiting for its client (40 %), then computing "
            "(35 %), then waiting while the devices worked for other runs (25 %).",
        ),
        ({"device": 10.0}, "The run spent most of this time computing (100 %)."),
    ],
)
def test_most_is_more_than_half(seconds, sentence):
    assert time_words.summary(NOTHING | seconds) == sentence


@pytest.mark.parametrize("cause", time_words.DOING)
def test_advice_to_a_client_is_about_what_a_client_can_do(cause):
    words = time_words.advice(cause, is_operator=False)
    assert words
    assert not any(word in words for word in ("--", "data directory", "disk", "More devices"))
    assert time_words.advice(cause, is_operator=True).startswith(words)
