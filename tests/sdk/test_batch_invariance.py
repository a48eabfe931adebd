"""serve --batch-invariant: samples through the real SDK are the same to the last bit, whatever happens."""

import os
import signal
import time

import pytest
import tinker
from tinker import types

from tests.sdk.examples import SECONDS, batch, prompt, random_tokens, train
from tests.sdk.server import AS_USUAL, BASE_MODEL, Server, serving

PROMPT = random_tokens(150, seed=1)
TOKENS = 120


@pytest.fixture(scope="module")
def invariant_server(model_dir, tmp_path_factory):
    data_dir = tmp_path_factory.mktemp("invariant") / "data"
    options = {"decode_rows": 32, "kv_cache_tokens": 640, "max_lora_adapters": 3, "batch_invariant": True}
    with serving(model_dir, data_dir, environment=AS_USUAL, **options) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def clients(invariant_server: Server):
    """Two tenants."""
    tenants = [
        tinker.ServiceClient(base_url=invariant_server.url, api_key=f"tml-{name}") for name in ("one", "two")
    ]
    yield tenants
    for tenant in tenants:
        tenant.close("success").result(SECONDS)


@pytest.fixture
def ours(clients):
    """A sampler of trained weights, whose tokens are far from certain."""
    trainer = clients[0].create_lora_training_client(BASE_MODEL, rank=8, seed=3).result(SECONDS)
    train(trainer, batch(1))
    return trainer.save_weights_and_get_sampling_client().result(SECONDS)


def ask(sampler, tokens=PROMPT, count=TOKENS, seed=7, **options):
    params = types.SamplingParams(max_tokens=count, seed=seed, stop=[])
    return sampler.sample(prompt(tokens), options.pop("num_samples", 1), params, **options)


def answer(future):
    """Tokens and log-probabilities of all samples."""
    result = future.result(4 * SECONDS)
    return [(sequence.tokens, sequence.logprobs) for sequence in result.sequences]


@pytest.mark.slow
def test_in_company_and_behind_a_hit_and_after_preemption(clients, ours):
    alone = answer(ask(ours))
    assert len(alone[0][0]) == TOKENS
    assert ask(ours).result(SECONDS).prompt_cache_hit_tokens == 128  # whole blocks of 64 tokens
    theirs = clients[1].create_sampling_client(base_model=BASE_MODEL).result(SECONDS)
    # Together they need far more pages than there are, so some are preempted and go on later.
    others = [ask(theirs, random_tokens(20 + number, 2), 100, number, num_samples=3) for number in range(6)]
    several = [ask(ours, PROMPT[: 100 + number], 60, number) for number in range(4)]
    crowded = answer(ask(ours))
    for other in [*others, *several]:
        assert all(sequence.tokens for sequence in other.result(4 * SECONDS).sequences)
    assert crowded == alone


@pytest.mark.slow
def test_after_the_worker_was_killed(invariant_server, ours):
    alone = answer(ask(ours, count=300))
    future = ask(ours, count=300)
    time.sleep(0.2)
    (pid,) = invariant_server.worker_pids()
    os.kill(pid, signal.SIGKILL)
    assert answer(future) == alone
