import pytest

from spmd_tx.coordinator.requests.backlog import SCORES_PER_TOKEN, most_cells, most_tokens
from spmd_tx.coordinator.wire.fields import TensorData
from spmd_tx.coordinator.wire.sampling import ModelInput, ModelInputChunk, SampleRequest, SamplingParams

CONTEXT, PROMPT = 100, 10


def request(max_tokens=20, n=3, **more):
    prompt = ModelInput([ModelInputChunk(tokens=[1] * 4), ModelInputChunk(tokens=[2] * 6)])
    return SampleRequest(
        prompt=prompt, sampling_params=SamplingParams(max_tokens=max_tokens), num_samples=n, **more
    )


@pytest.mark.parametrize("max_tokens, drawn", [(20, 20), (None, 90), (1000, 90)])
def test_a_request_takes_its_prompt_once_and_the_tokens_of_all_samples(max_tokens, drawn):
    assert most_tokens(request(max_tokens), CONTEXT) == PROMPT + 3 * drawn


@pytest.mark.parametrize(
    "wish, scores",
    [
        ({"topk_sample_logprobs": 256}, 3 * 20 * 256),
        ({"topk_prompt_logprobs": 16}, PROMPT * 16),
        ({"prompt_alt_tokens_k": 8, "topk_prompt_logprobs": 16}, PROMPT * 24),
        ({"target_prompt_logprobs": TensorData(data=[1.0] * 400, dtype="int64", shape=[9, 50])}, 400),
        ({"prompt_logprobs": True}, 0),
    ],
)
def test_scores_of_other_tokens_count_a_part_of_a_token(wish, scores):
    plain = most_tokens(request(), CONTEXT)
    assert most_tokens(request(**wish), CONTEXT) == plain + scores // SCORES_PER_TOKEN


def test_an_answer_has_likeliest_tokens_in_the_place_of_each_drawn_one():
    assert most_cells(request(topk_sample_logprobs=5), CONTEXT) == 3 * 20 * 5
    assert most_cells(request(), CONTEXT) == 0
