"""Decodes that read prompts beside their rows, through the SDK: the same answers, also after kill -9.

The server believes that it saves time, which on CPUs it does not.
"""

import os
import re
import signal
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker

from spmd_tx.demo import tiny_model
from tests.sdk.examples import SECONDS, VOCABULARY, drawn, prompt, random_tokens
from tests.sdk.server import BASE_MODEL, Server, serving
from tests.support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SERVER = [sys.executable, str(Path(__file__).with_name("serve_with_chunks_beside.py"))]
CONTEXT = 4096
SPEC = tiny_model.Spec(n_heads=4, n_kv_heads=2, vocab_size=VOCABULARY, max_positions=CONTEXT)
RUNNING, LONG = random_tokens(20, 1), random_tokens(3500, 2)
SAME = 1e-4  # nats


def tokens_beside(server: Server) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=SECONDS).text
    found = re.findall(r"^spmd_tx_prompt_tokens_beside_decodes_total\{.*\} (.+)$", text, re.MULTILINE)
    return sum(map(float, found))


def new_session(server: Server) -> tuple[tinker.ServiceClient, tinker.SamplingClient]:
    """A session finds nothing in the caches of others."""
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    return service, service.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)


def ask(sampler: tinker.SamplingClient):
    """Ask for a long answer, and then for one to a long prompt."""
    yield sampler.sample(prompt(RUNNING), 2, drawn(500, seed=1))
    yield sampler.sample(prompt(LONG), 2, drawn(100, seed=2))


def answers(futures):
    return [each for future in futures for each in future.result(SECONDS).sequences]


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert list(ours.tokens) == list(theirs.tokens)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=SAME)


@pytest.mark.parametrize("killed", ["worker", "server"])
def test_the_same_beside_and_after_a_kill(killed, tmp_path):
    model, data, port = tiny_model.write(tmp_path / "model", SPEC), tmp_path / "data", free_port()
    options = {"command": SERVER, "port": port, "kv_cache_tokens": 16384}
    with serving(model, data, **options) as server:
        server.wait_until_ready()
        service, sampler = new_session(server)
        services, until = [service], time.monotonic() + SECONDS
        expected = answers(ask(sampler))  # one after the other
        assert not tokens_beside(server)
        while not tokens_beside(server):  # until its program is compiled
            assert time.monotonic() < until, "no Decode reads a prompt"
            service, sampler = new_session(server)
            services.append(service)
            assert_same(answers(list(ask(sampler))), expected)
        before = tokens_beside(server)
        service, sampler = new_session(server)
        futures = list(ask(sampler))
        while tokens_beside(server) == before:
            assert time.monotonic() < until + SECONDS, "no Decode reads a prompt again"
        if killed == "worker":
            os.kill(server.worker_pids()[0], signal.SIGKILL)
            assert_same(answers(futures), expected)
        else:
            server.process.kill()
            server.process.wait()
            with serving(model, data, **options) as again:
                again.wait_until_ready()
                assert_same(answers(futures), expected)
        for each in (*services, service):
            each.holder.close()
