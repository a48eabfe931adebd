from hypothesis import given
from hypothesis import strategies as st

from spmd_tx.coordinator.groups.routing import (
    KEPT_TOGETHER_SECONDS,
    MOST_BEGINNINGS,
    Beginnings,
    GroupChoice,
    chosen,
    why,
)
from spmd_tx.coordinator.scheduler.sample_offer import SampleOffer

OFFERS = st.builds(
    SampleOffer,
    waiting=st.integers(0, 10**6),
    unread=st.integers(0, 10**5),
    draws=st.floats(1, 1e5),
    reads=st.floats(1, 1e5),
    must_load=st.booleans(),
)
CHOICES = st.lists(st.builds(GroupChoice, st.booleans(), st.booleans(), OFFERS), min_size=1, max_size=6)


@given(CHOICES)
def test_no_sample_goes_to_a_group_that_is_down_while_another_is_up(choices):
    choice = choices[chosen(choices)]
    assert choice.is_ready or not any(each.is_ready for each in choices)


@given(CHOICES)
def test_training_is_disturbed_only_where_nobody_else_can_sample(choices):
    if choices[chosen(choices)].trains:
        others = [each for each in choices if not each.trains]
        assert not any(each.is_ready for each in others)
        assert not others or any(each.is_ready for each in choices)


@given(CHOICES)
def test_of_equals_the_one_that_begins_first_is_chosen(choices):
    choice = choices[chosen(choices)]
    equals = [each for each in choices if each[:2] == choice[:2]]
    assert choice.offer.seconds == min(each.offer.seconds for each in equals)


@given(
    st.lists(st.integers(1, 10**4), min_size=1, max_size=200),
    st.lists(st.floats(1, 1e4), min_size=2, max_size=5),
)
def test_nobody_starves_when_all_samples_arrive_at_once(samples, speeds):
    """No line is longer, in seconds, than the whole work shared evenly, plus the longest sample on it."""
    waiting = [0] * len(speeds)
    for tokens in samples:
        offers = [SampleOffer(line, draws=speed) for line, speed in zip(waiting, speeds, strict=True)]
        waiting[chosen([GroupChoice(False, True, offer) for offer in offers])] += tokens
    even, slowest = sum(samples) / sum(speeds), max(samples)
    for line, speed in zip(waiting, speeds, strict=True):
        assert line / speed <= even + slowest / speed + 1e-6


def test_a_prompt_in_the_cache_outweighs_a_shorter_line_until_the_line_is_longer_than_reading_it():
    def begin(waiting):
        with_prompt = SampleOffer(waiting, unread=0)
        without = SampleOffer(0, unread=500)
        return chosen([GroupChoice(False, True, each) for each in (with_prompt, without)])

    assert begin(waiting=400) == 0
    assert begin(waiting=600) == 1


def test_samples_that_begin_alike_are_kept_together_for_some_seconds():
    beginnings = Beginnings()
    beginnings.note(b"a", "x", now=0.0)
    assert beginnings.group_of(b"a", now=KEPT_TOGETHER_SECONDS / 2) == "x"
    assert beginnings.group_of(b"a", now=KEPT_TOGETHER_SECONDS) is None
    assert beginnings.group_of(b"b", now=0.0) is None
    for number in range(MOST_BEGINNINGS):
        beginnings.note(number.to_bytes(4, "little"), "y", now=1.0)
    assert beginnings.group_of(b"a", now=1.0) is None, "nothing grows forever"


def test_a_choice_says_what_decided_it():
    def choices(*offers):
        return [GroupChoice(False, True, offer) for offer in offers]

    short, cached = SampleOffer(100, unread=1000), SampleOffer(900, unread=100)
    assert why(choices(short, cached), chosen(choices(short, cached))) == "cached"
    longer = SampleOffer(2000, unread=100)
    assert why(choices(short, longer), chosen(choices(short, longer))) == "waiting"
    assert why([GroupChoice(True, True, short), GroupChoice(False, True, longer)], 1) == "only"
