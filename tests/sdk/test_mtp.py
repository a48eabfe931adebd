"""Drafts of the model's own layer, through the SDK: tokens and log-probabilities are those of plain steps."""

import re
import time

import httpx
import numpy as np
import pytest
import tinker

from spmd_tx.demo import tiny_model
from tests.sdk.examples import CONTEXT, SECONDS, VOCABULARY, drawn, prompt, random_tokens
from tests.sdk.server import BASE_MODEL, serving
from tests.support.mtp_models import write_that_expects
from tests.support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT, TOKENS = random_tokens(20, seed=1), 200
LAYERS = 12  # beside which the one of drafts costs little
ROUNDING = 1e-4  # nats


def counted(server, name):
    text = httpx.get(f"{server.url}/metrics", timeout=SECONDS).text
    return sum(map(float, re.findall(rf"^spmd_tx_{name}_tokens_total\{{.*\}} (.+)$", text, re.MULTILINE)))


def ask(server, seed):
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    sampler = service.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)
    found = sampler.sample(prompt(PROMPT), 1, drawn(TOKENS, seed=seed)).result(SECONDS)
    return [(each.tokens, each.logprobs) for each in found.sequences]


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_single_stream_reads_what_the_model_expects(family, tmp_path):
    model = tiny_model.write(
        tmp_path / "model", tiny_model.Spec(vocab_size=VOCABULARY, max_positions=CONTEXT)
    )
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "num_hidden_layers": LAYERS}
    write_that_expects(model, family, **sizes)
    with serving(model, tmp_path / "plain") as server:
        server.wait_until_ready()
        expected = [ask(server, seed) for seed in range(3)]
    with serving(model, tmp_path / "data", speculation="mtp", port=free_port()) as server:
        server.wait_until_ready()
        until, seed = time.monotonic() + SECONDS, 0
        while counted(server, "accepted") < TOKENS // 4:  # until its program is compiled
            assert time.monotonic() < until, "nothing is read ahead"
            for (tokens, logprobs), (its_tokens, its_logprobs) in zip(
                ask(server, seed % 3), expected[seed % 3], strict=True
            ):
                assert tokens == its_tokens
                np.testing.assert_allclose(logprobs, its_logprobs, rtol=0, atol=ROUNDING)
            seed += 1
        assert counted(server, "accepted") > 0.5 * counted(server, "drafted")
