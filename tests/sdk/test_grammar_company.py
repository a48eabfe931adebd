"""Requests with grammars change nothing of those beside them, and draw the same on every mesh.

Run by ``pytest -m slow tests/sdk/test_grammar_company.py``.
"""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import tinker

from tests.sdk.examples import SECONDS, drawn, random_tokens, sample
from tests.sdk.server import AS_USUAL, BASE_MODEL, serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

TOKENS = 120
TURNS = 6  # of the request without a grammar, beside the others
FORMS = [
    {"regex": "[a-z0-9]{150}"},
    {"regex": r"(.|\n)*"},
    {"grammar": 'start: %json {"type": "array", "items": {"type": "integer"}, "minItems": 40}'},
    {"grammar": 'start: ("left " | "right ")+ "end"'},
]
SIZES = ("fully_sharded_data_parallel_size", "expert_parallel_size", "tensor_parallel_size")
MESHES = [(1, 1, 1), (2, 1, 1), (1, 1, 2)]


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["any company", "batch-invariant"])
def test_company_with_grammars_changes_nothing_on_any_mesh(batch_invariant, model_dir, tmp_path):
    """With --batch-invariant not even the last bit of a log-probability."""
    found = []
    for number, mesh in enumerate(MESHES):
        options = dict(zip(SIZES, mesh, strict=True)) | ({"batch_invariant": True} if batch_invariant else {})
        with serving(model_dir, tmp_path / f"data {number}", environment=AS_USUAL, **options) as server:
            server.wait_until_ready()
            (tokens, logprobs), *beside, texts = observed(server)
        assert len(tokens) == TOKENS
        for other_tokens, other_logprobs in beside:
            assert other_tokens == tokens
            assert other_logprobs == logprobs or not batch_invariant
        found.append((tokens, texts))
    assert all(each == found[0] for each in found)


def observed(server):
    """What is drawn without a grammar, alone and then beside others; last, what those answer."""
    headers = {"x-api-key": "tml-forms"}
    with (
        tinker.ServiceClient(base_url=server.url, api_key="tml-free") as service,
        httpx.Client(base_url=server.url, headers=headers, timeout=SECONDS) as http,
        ThreadPoolExecutor(2 * len(FORMS)) as threads,
    ):
        sampler = service.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)
        free = [without(sampler)]
        alone = [constrained(http, number) for number in range(len(FORMS))]
        for _ in range(TURNS):
            others = [threads.submit(constrained, http, number) for number in range(2 * len(FORMS))]
            free.append(without(sampler))
            together = [other.result(SECONDS) for other in others]
            assert together[: len(FORMS)] == alone
    return [*free, alone]


def without(sampler):
    asked = drawn(max_tokens=TOKENS, seed=7)
    sequence = sample(sampler, random_tokens(40, seed=1), asked)
    return sequence.tokens, sequence.logprobs


def constrained(http, number):
    body = {"model": BASE_MODEL, "prompt": "one", "max_tokens": TOKENS, "seed": number, "n": 2}
    answer = http.post("/oai/api/v1/completions", json=body | FORMS[number % len(FORMS)]).raise_for_status()
    return [choice["text"] for choice in answer.json()["choices"]]
