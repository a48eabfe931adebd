import numpy as np
import pytest
from tinker.proto.response_conv import deserialize_sample_response

from spmd_tx.coordinator.wire.sampling_protobuf import (
    PromptScores,
    SampledSequence,
    TargetLogprobs,
    TopLogprobs,
    decode_sample_response,
    encode_sample_response,
)

TOP = TopLogprobs(np.array([[5, 3], [2, 7]], np.int32), np.array([[-0.5, -1], [-0.25, -3]], np.float32))


def test_the_sdk_reads_samples():
    sequences = [
        SampledSequence([1, 2], [-0.5, -1.0], "stop", TOP),
        SampledSequence([3], [-2.0], "length"),
    ]
    scores = PromptScores(np.array([np.nan, -0.25], np.float32))
    response = deserialize_sample_response(encode_sample_response(sequences, scores, cache_hits=7))
    assert [sequence.tokens for sequence in response.sequences] == [[1, 2], [3]]
    assert [sequence.logprobs for sequence in response.sequences] == [[-0.5, -1.0], [-2.0]]
    assert [sequence.stop_reason for sequence in response.sequences] == ["stop", "length"]
    assert response.sequences[0].topk_logprobs == [[(5, -0.5), (3, -1.0)], [(2, -0.25), (7, -3.0)]]
    assert response.sequences[1].topk_logprobs is None
    assert response.prompt_logprobs == [None, -0.25]
    assert response.prompt_cache_hit_tokens == 7


def test_what_was_not_asked_for_is_left_out():
    response = deserialize_sample_response(encode_sample_response([SampledSequence([1], [0.0], "stop")]))
    assert response.prompt_logprobs is None
    assert response.topk_prompt_logprobs is None
    assert response.target_prompt_logprobs is None
    assert response.prompt_alt_tokens is None


def test_the_sdk_reads_an_empty_first_row_as_none():
    top = TopLogprobs.join([TopLogprobs.none(1, 2), TOP])
    response = deserialize_sample_response(encode_sample_response([], PromptScores(top=top)))
    assert response.topk_prompt_logprobs == [None, [(5, -0.5), (3, -1.0)], [(2, -0.25), (7, -3.0)]]


@pytest.mark.parametrize("length", [0, 3])
def test_the_sdk_reads_draws_of_a_prompt(length):
    tokens, logprobs = np.arange(2 * length).reshape(length, 2), -np.ones((length, 2), np.float32)
    scores = PromptScores(drawn_tokens=tokens, drawn_logprobs=logprobs)
    alternatives = deserialize_sample_response(encode_sample_response([], scores)).prompt_alt_tokens
    assert alternatives.tokens.shape == alternatives.logprobs.shape == [length, 2]
    assert list(alternatives.tokens.data) == tokens.ravel().tolist()
    assert list(alternatives.logprobs.data) == logprobs.ravel().tolist()


def test_the_sdk_reads_targets_as_they_were_laid_out():
    dense = PromptScores(targets=TargetLogprobs(np.array([-1, 0, 0, -2], np.float32), (2, 2)))
    read = deserialize_sample_response(encode_sample_response([], dense)).target_prompt_logprobs
    assert (read.shape, list(read.data), read.sparse_crow_indices) == ([2, 2], [-1, 0, 0, -2], None)
    values, starts, columns = np.array([-1, -2], np.float32), np.array([0, 1, 2]), np.array([0, 1])
    sparse = PromptScores(targets=TargetLogprobs(values, (2, 2), starts, columns))
    read = deserialize_sample_response(encode_sample_response([], sparse)).target_prompt_logprobs
    assert (list(read.data), read.sparse_crow_indices, read.sparse_col_indices) == (
        [-1, -2],
        [0, 1, 2],
        [0, 1],
    )


def test_samples_are_read_back_as_they_were_written():
    sequences = [
        SampledSequence([1, 2], [-0.5, -1.0], "stop", TOP),
        SampledSequence([3, 4], [-2.0, 0.0], "length", forced=(False, True)),
    ]
    first, second = decode_sample_response(encode_sample_response(sequences))
    assert (first.tokens, first.logprobs, first.stop_reason) == ([1, 2], [-0.5, -1.0], "stop")
    np.testing.assert_array_equal(first.top.tokens, TOP.tokens)
    np.testing.assert_array_equal(first.top.logprobs, TOP.logprobs)
    assert second == sequences[1]
