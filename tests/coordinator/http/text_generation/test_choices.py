import numpy as np
import pytest

from spmd_tx.coordinator.http.text_generation.choices import ChoiceProgress
from spmd_tx.coordinator.http.text_generation.detokenize import SampleText
from spmd_tx.coordinator.sampling.job import Sample
from spmd_tx.coordinator.sampling.request.stops import StopRule, StopWatch
from spmd_tx.coordinator.wire.sampling_protobuf import SampledSequence, TopLogprobs

WIDTH = 2


class Job:
    """What a sample reads of its job."""

    max_tokens, top = 9, WIDTH


def likeliest(*tokens):
    return TopLogprobs(
        np.array([[token, token + 1] for token in tokens], np.int32), np.zeros((len(tokens), 2))
    )


@pytest.fixture
def sample():
    sample = Sample(Job(), 0, b"", StopWatch(StopRule(), None))  # type: ignore[arg-type]
    for tokens in ([10, 11], [12], [13, 14, 15]):
        sample.extend(tokens, [-1.0] * len(tokens), top=likeliest(*tokens))
    return sample


@pytest.mark.parametrize("first, end", [(0, 6), (0, 2), (1, 2), (1, 5), (3, 6), (5, 6), (5, 99)])
def test_a_sample_that_is_drawn_tells_of_some_places_what_it_tells_of_all(sample, first, end):
    whole, some = sample.top, sample.top_of(first, end)
    assert some.tokens.tolist() == whole.tokens[first:end].tolist()
    assert some.logprobs.shape == some.tokens.shape


def test_nothing_is_told_of_no_place(sample):
    assert sample.top_of(6, 6) is None
    sample.tops.clear()
    assert sample.top_of(0, 6) is None


def test_parts_are_copies_that_follow_each_other(sample, tokenizer):
    choice = ChoiceProgress(0, SampleText(tokenizer, []), False)
    first, second = choice.take(sample, 4), choice.take(sample, 4)
    assert (first.tokens, second.tokens) == ([10, 11, 12, 13], [14, 15])
    assert second.top.tokens[:, 0].tolist() == [14, 15]
    assert choice.take(sample, 4) is None
    sample.extend([16], [-2.0], top=likeliest(16))
    assert (first.tokens, second.tokens) == ([10, 11, 12, 13], [14, 15])
    third = choice.take(sample, 4)
    assert (third.tokens, third.logprobs, third.stop_reason) == ([16], [-2.0], None)


def test_the_last_part_says_why_the_sample_has_ended_even_without_tokens(tokenizer):
    choice = ChoiceProgress(0, SampleText(tokenizer, []), False)
    choice.take(SampledSequence([1, 2], [0.0, 0.0], "stop"), 1)
    assert not choice.is_over
    choice.take(SampledSequence([1, 2], [0.0, 0.0], "stop"), 1)
    assert choice.is_over
    empty = ChoiceProgress(0, SampleText(tokenizer, []), False)
    part = empty.take(SampledSequence([], [], "stop"), 1)
    assert (part.tokens, part.stop_reason, empty.is_over) == ([], "stop", True)


def test_what_begins_again_is_not_told_again(sample, tokenizer):
    choice = ChoiceProgress(0, SampleText(tokenizer, []), False)
    choice.take(sample, 99)
    again = SampledSequence([10, 11], [-1.0, -1.0], "length")
    shorter = Sample(Job(), 0, b"", StopWatch(StopRule(), None))  # type: ignore[arg-type]
    shorter.extend([10, 11], [-1.0, -1.0])
    assert choice.take(shorter, 99) is None
    assert choice.take(again, 99).tokens == []
