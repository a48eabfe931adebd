"""Speculation through the SDK: what plain steps draw, to the bit if so asked; also after kill -9."""

import os
import re
import signal
import time

import httpx
import numpy as np
import pytest
import tinker

from spmd_tx.demo import tiny_model
from tests.golden import families
from tests.sdk.examples import CONTEXT, SECONDS, VOCABULARY, drawn, prompt, random_tokens
from tests.sdk.server import AS_USUAL, BASE_MODEL, Server, serving
from tests.support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT = random_tokens(20, seed=1)
ANSWERS, TOKENS = 2, 200
PAUSE = 0.01  # seconds; much less than an answer takes
INVARIANT = {"environment": AS_USUAL, "batch_invariant": True}
TWO = {"num_processes": 2, "fully_sharded_data_parallel_size": 2}
FOUR = {"num_processes": 4, "fully_sharded_data_parallel_size": 2, "tensor_parallel_size": 2}
ROUNDING = 4e-4  # nats; states add up what was rounded before


def accepted_tokens(server: Server) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=SECONDS).text
    found = re.findall(r"^spmd_tx_accepted_tokens_total\{.*\} (.+)$", text, re.MULTILINE)
    return sum(map(float, found))


def sampler_of(server: Server) -> tinker.SamplingClient:
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    return service.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)


def ask(sampler: tinker.SamplingClient):
    return sampler.sample(prompt(PROMPT), ANSWERS, drawn(TOKENS, seed=7))


def read_ahead(server: Server, sampler: tinker.SamplingClient, until: float):
    """Ask until drafts are read: plain steps may give an answer while other programs compile."""
    while time.monotonic() < until:
        before, future = accepted_tokens(server), ask(sampler)
        while not future.future().done():
            if accepted_tokens(server) > before:
                return future
            time.sleep(PAUSE)
    raise AssertionError("nothing is read ahead again")


def answers(future) -> list[tuple[list[int], list[float]]]:
    return [(each.tokens, each.logprobs) for each in future.result(SECONDS).sequences]


def assert_same(found, expected, rounding: float) -> None:
    for (tokens, logprobs), (expected_tokens, expected_logprobs) in zip(found, expected, strict=True):
        assert tokens == expected_tokens
        np.testing.assert_allclose(logprobs, expected_logprobs, rtol=0, atol=rounding)


@pytest.mark.parametrize("killed", ["worker", "server"])
@pytest.mark.parametrize(
    ("family", "how", "rounding"),
    [
        *((family, INVARIANT, 0.0) for family in ("llama", "qwen3_5", "gpt_oss")),
        *((family, {}, ROUNDING) for family in ("qwen3_5", "gpt_oss")),
        *(("llama", INVARIANT | processes, 0.0) for processes in (TWO, FOUR)),
    ],
    ids=[
        *("pages, to the bit", "states, to the bit", "rings, to the bit", "states", "rings"),
        *("two processes, to the bit", "four processes, to the bit"),
    ],
)
def test_what_plain_steps_draw_also_after_a_kill(family, how, rounding, killed, tmp_path):
    model = tiny_model.write(
        tmp_path / "model", tiny_model.Spec(vocab_size=VOCABULARY, max_positions=CONTEXT)
    )
    families.write(model, family, vocab_size=VOCABULARY, max_position_embeddings=CONTEXT)
    with serving(model, tmp_path / "plain", **how) as server:
        server.wait_until_ready()
        expected = answers(ask(sampler_of(server)))
    options = {**how, "speculation": "auto", "port": free_port()}
    with serving(model, tmp_path / "data", **options) as server:
        server.wait_until_ready()
        sampler, until = sampler_of(server), time.monotonic() + SECONDS
        while not accepted_tokens(server):  # until its program is compiled
            assert time.monotonic() < until, "nothing is read ahead"
            assert_same(answers(ask(sampler)), expected, rounding)
        future = read_ahead(server, sampler, until + SECONDS)
        if killed == "worker":
            os.kill(server.worker_pids()[-1], signal.SIGKILL)
            assert_same(answers(future), expected, rounding)
        else:
            server.process.kill()
            server.process.wait()
            with serving(model, tmp_path / "data", **options) as again:
                again.wait_until_ready()
                assert_same(answers(future), expected, rounding)
