import numpy as np
import pytest

from spmd_tx.coordinator.sampling.request import prompt_scores
from spmd_tx.coordinator.sampling.request.target_tokens import read
from spmd_tx.coordinator.wire.fields import TensorData
from spmd_tx.coordinator.wire.sampling import ImageRef, ModelInput, ModelInputChunk, SampleRequest
from spmd_tx.coordinator.wire.sampling_protobuf import NO_LOGPROB
from spmd_tx.errors import InvalidRequest

VOCABULARY = 100
LENGTH = 4


def body(**wishes):
    return SampleRequest(ModelInput([]), **wishes)


def dense(*rows):
    return TensorData([float(each) for row in rows for each in row], "int64", [len(rows), len(rows[0])])


def sparse(values, starts, columns, shape):
    return TensorData([float(each) for each in values], "int64", list(shape), list(starts), list(columns))


@pytest.mark.parametrize(
    "tensor",
    [
        dense([-1, 5, 7], [-1, -1, -1], [3, -1, -1]),
        sparse([5, 7, 3], [0, 2, 2, 3], [1, 2, 0], (3, 3)),
        sparse([5, 7, -1, 3], [0, 3, 3, 4], [1, 2, 0, 0], (3, 10**6)),
    ],
    ids=["dense", "sparse", "sparse with an empty cell, and very wide"],
)
def test_named_tokens_move_together_and_answers_go_back_to_their_cells(tensor):
    targets = read(tensor, LENGTH, VOCABULARY)
    np.testing.assert_array_equal(targets.tokens, [[5, 7], [-1, -1], [3, -1]])
    answer = targets.answer(np.where(targets.tokens < 0, np.nan, -targets.tokens).astype(np.float32))
    np.testing.assert_array_equal(answer.values, [-max(0, token) for token in tensor.data])
    assert answer.shape == tuple(tensor.shape)
    assert (answer.columns is None) == (tensor.sparse_col_indices is None)


@pytest.mark.parametrize(
    "tensor, complaint",
    [
        (TensorData([1.0] * 3, "float32", [3, 1]), "dtype 'float32'"),
        (TensorData([1.0] * 3, "int64"), "0 dimensions"),
        (dense([1], [2]), "send 3 rows"),
        (TensorData([1.0] * 4, "int64", [3, 1]), "holds 4 values"),
        (dense([1], [VOCABULARY], [2]), "token ID 100"),
        (dense([1], [-2], [2]), "token ID -2"),
        (dense([1], [1.5], [2]), "not token IDs"),
        (dense([1], [float("nan")], [2]), "not token IDs"),
        (dense([-1], [-1], [-1]), "names no token"),
        (TensorData([], "int64", [3, 0]), "names no token"),
        (sparse([1, 2], [0, 1, 2], [0, 0], (3, 1)), "indices do not fit"),
        (sparse([1, 2], [0, 2, 1, 2], [0, 0], (3, 1)), "indices do not fit"),
        (sparse([1, 2], [0, 1, 1, 2], [0, 1], (3, 1)), "indices do not fit"),
        (TensorData([1.0], "int64", [3, 1], [0, 0, 0, 1]), "indices do not fit"),
        (sparse([5], [0, 1, 1, 1], [0], (3, 2**63)), "columns"),
        (sparse([5], [0, 1, 1, 1], [2**64], (3, 2)), "indices do not fit"),
        (TensorData([], "int64", [3, 10**30]), "columns"),
        (TensorData([], "int64", [3, -1]), "columns"),
        (TensorData([], "int64", [10**30, 1]), "send 3 rows"),
        (TensorData([], "int64", [1] * 100_000), "100000 dimensions"),
    ],
)
def test_targets_that_make_no_sense_are_refused(tensor, complaint):
    with pytest.raises(InvalidRequest, match=complaint):
        read(tensor, LENGTH, VOCABULARY)


@pytest.mark.parametrize(
    "wishes, length, drawn, complaint",
    [
        ({"topk_prompt_logprobs": VOCABULARY + 1}, LENGTH, 1, "between 0 and 100"),
        ({"topk_prompt_logprobs": 100}, 20_000, 1, "1048576 values"),
        ({"topk_sample_logprobs": 100}, LENGTH, 20_000, "1048576 values"),
        ({"prompt_alt_tokens_k": 257}, LENGTH, 1, "between 0 and 256"),
        ({"prompt_logprobs_last_n": 2}, LENGTH, 1, "prompt_logprobs is not set"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 0}, LENGTH, 1, "at least 1 and at most 3"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 4}, LENGTH, 1, "at least 1 and at most 3"),
        ({"target_prompt_logprobs": dense(*[[1] * 257] * 3)}, LENGTH, 1, "257 tokens at one position"),
    ],
)
def test_wishes_beyond_the_limits_are_refused(wishes, length, drawn, complaint):
    with pytest.raises(InvalidRequest, match=complaint):
        prompt_scores.check(body(**wishes), length, drawn, VOCABULARY)


def test_tokens_that_are_not_to_be_scored_have_empty_rows():
    asked = body(prompt_logprobs=True, topk_prompt_logprobs=1, prompt_logprobs_last_n=2)
    wishes = prompt_scores.of(asked, LENGTH, VOCABULARY, (0, 0))
    top = np.arange(6).reshape(3, 2)
    scores = wishes.scores(
        {"logprobs": np.array([-1.0, -2, -3]), "top_tokens": top, "top_logprobs": -top.astype(np.float32)}
    )
    np.testing.assert_array_equal(scores.logprobs, [np.nan, np.nan, -2, -3])
    np.testing.assert_array_equal(scores.top.tokens, [[0], [0], [2], [4]])
    np.testing.assert_array_equal(scores.top.logprobs, [[NO_LOGPROB], [NO_LOGPROB], [-2], [-4]])


def test_tokens_of_images_have_no_scores():
    image = ModelInputChunk(stored=ImageRef("0" * 32, 2, 64, 32, 9))
    prompt = ModelInput([ModelInputChunk(tokens=[1]), image, ModelInputChunk(tokens=[2])])
    asked = SampleRequest(prompt, prompt_logprobs=True, topk_prompt_logprobs=1)
    scores = prompt_scores.of(asked, LENGTH, VOCABULARY, (0, 0)).scores(
        {
            "logprobs": np.array([-1.0, -2, -3]),
            "top_tokens": np.array([[7], [8], [9]]),
            "top_logprobs": -np.ones((3, 1), np.float32),
        }
    )
    np.testing.assert_array_equal(scores.logprobs, [np.nan, np.nan, np.nan, -3])
    np.testing.assert_array_equal(scores.top.tokens, [[0], [0], [0], [9]])
    np.testing.assert_array_equal(scores.top.logprobs, [*[[NO_LOGPROB]] * 3, [-1]])


def test_nothing_is_sent_to_the_device_when_logprobs_are_all_that_is_wanted():
    wishes = prompt_scores.of(body(prompt_logprobs=True), LENGTH, VOCABULARY, (0, 0))
    assert prompt_scores.for_device((1, 8), [(wishes, (0, slice(3)), 0)], VOCABULARY) is None
    assert prompt_scores.for_device((1, 8), [], VOCABULARY) is None


@pytest.mark.parametrize("count, computed", [(0, 0), (1, 4), (4, 4), (5, 8), (65, 100)])
def test_widths_come_in_few_sizes_and_never_exceed_the_vocabulary(count, computed):
    assert prompt_scores.width(count, VOCABULARY) == computed


@pytest.mark.parametrize(
    "wish, first",
    [
        ({}, LENGTH - 1),
        ({"prompt_logprobs": True}, 0),
        ({"topk_prompt_logprobs": 1}, 0),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 2}, 1),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 1, "prompt_alt_tokens_k": 1}, 0),
        ({"target_prompt_logprobs": dense([-1], [-1], [3])}, 2),
    ],
)
def test_tokens_are_read_again_from_the_first_that_is_scored(wish, first):
    assert prompt_scores.of(body(**wish), LENGTH, VOCABULARY, (0, 0)).first_scored == first
