"""How many rows read ahead depends on what they cost."""

import pytest

from spmd_tx.coordinator.sampling.bank import BASE_MODEL
from spmd_tx.coordinator.sampling.guesses import Guesses
from spmd_tx.coordinator.sampling.new_job import SamplingModel, make_job
from spmd_tx.coordinator.sampling.shapes import SamplingShapes
from spmd_tx.coordinator.wire.sampling import ModelInput, ModelInputChunk, SampleRequest, SamplingParams
from tests.coordinator.sampling.bench import MODEL, Words

CONTEXT, SAMPLES = 8192, 4


def followers(tokens: int, *, on_cpu: bool) -> int:
    """Return how many rows read ahead beside four samples of so many tokens, with good drafts."""
    model = SamplingModel(MODEL, CONTEXT, Words(), batch_invariant=False)
    prompt = ModelInput([ModelInputChunk(tokens=[1] * tokens)])
    body = SampleRequest(prompt, SamplingParams(max_tokens=CONTEXT - tokens), num_samples=SAMPLES)
    job = make_job("request", 0, body, BASE_MODEL, model)
    guesses = Guesses(SamplingShapes(1, CONTEXT, 16, 128, on_cpu=on_cpu, speculates=True))
    guesses._texts.of(job.session or job.request_id, job.prompt).record.note(right=32, wrong=8)
    rows = guesses.make([job.samples], is_known=True)
    return 0 if rows is None else sum(guess.followers for guess in rows.guesses.values())


@pytest.mark.parametrize(("tokens", "expected"), [(200, 12), (4000, 0)])
def test_on_cpus_rows_that_attend_to_much_do_not_read_ahead(tokens, expected):
    assert followers(tokens, on_cpu=True) == expected


@pytest.mark.parametrize("tokens", [200, 4000])
def test_on_accelerators_rows_cost_little_whatever_they_attend_to(tokens):
    assert followers(tokens, on_cpu=False) == 12
