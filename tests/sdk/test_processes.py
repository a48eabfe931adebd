"""Servers of other shapes: two worker processes, PostgreSQL; how they start and how they end."""

import os
import signal
import time

import httpx
import numpy as np
import pytest
import tinker

from tests.sdk.examples import (
    SECONDS,
    batch,
    drawn,
    logprobs_of,
    prompt,
    random_tokens,
    sample,
    train,
)
from tests.sdk.server import BASE_MODEL, COMMAND, Server, serving
from tests.support.ports import free_port

PROMPT = random_tokens(10, seed=0)
QUESTION = batch(seed=9)
LONG = drawn(max_tokens=200)


def work(server: Server) -> tuple[list[float], np.ndarray, list[int], list[float]]:
    """A bit of everything: train, save, resume, train on, save a named version, and sample from it."""
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as service:
        trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
        losses = [train(trainer, batch(seed)) for seed in range(3)]
        path = trainer.save_state("state").result(SECONDS).path
        resumed = service.create_training_client_from_state_with_optimizer(path).result(SECONDS)
        for each in (trainer, resumed):
            losses.append(train(each, batch(seed=3)))
        logprobs = logprobs_of(resumed, QUESTION)
        np.testing.assert_array_equal(logprobs, logprobs_of(trainer, QUESTION))
        named = resumed.save_weights_for_sampler("v1").result(SECONDS).path
        sampler = service.create_sampling_client(model_path=named).result(SECONDS)
        answer = sample(sampler, PROMPT, drawn(max_tokens=12, seed=5))
    return losses, logprobs, answer.tokens, answer.logprobs


@pytest.fixture(scope="module")
def expected(server):
    """What one process on one device computes."""
    return work(server)


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow  # two processes that lose a worker are also those of tests/chaos
def test_two_processes_compute_what_one_does_and_outlive_a_lost_worker(model_dir, tmp_path, expected):
    options = {"num_processes": 2, "fully_sharded_data_parallel_size": 2}
    with serving(model_dir, tmp_path / "data", **options) as server:
        server.wait_until_ready()
        assert_same(work(server), expected)

        service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
        sampler = service.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)
        pending = [sampler.sample(prompt(PROMPT), 1, LONG) for _ in range(10)]
        sample(sampler, PROMPT, drawn(max_tokens=4))
        lost = server.worker_pids()
        os.kill(lost[1], signal.SIGKILL)
        answers = [each.result(SECONDS).sequences[0].tokens for each in pending]
        assert [len(tokens) for tokens in answers] == [200] * 10
        assert set(server.worker_pids()).isdisjoint(lost)
        assert "worker 1 on" in server.log
        assert "was killed by signal 9 (SIGKILL)" in server.log
        service.holder.close()
        assert server.terminate() == 0


def test_a_server_on_postgresql_says_when_it_is_ready_and_continues(model_dir, tmp_path, postgres, expected):
    postgres.psql("CREATE DATABASE of_this_test;")
    options = {"database_url": postgres.get_uri(database="of_this_test"), "drain_seconds": 0}
    port = free_port()
    with serving(model_dir, tmp_path / "data", port=port, **options) as server:
        health = wait_until_it_answers(server)
        assert (health.status_code, health.json()["status"]) == (503, "starting")
        assert health.json()["detail"]
        server.wait_until_ready()
        assert httpx.get(f"{server.url}/api/v1/healthz").json() == {"status": "ok"}
        assert_same(work(server), expected)

        service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
        sampler = service.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)
        pending = [sampler.sample(prompt(PROMPT), 1, LONG) for _ in range(10)]
        sample(sampler, PROMPT, drawn(max_tokens=4))
        assert server.terminate() == 0
        assert "Traceback" not in server.log
    options["command"] = [str(COMMAND)]  # as an operator starts it
    with serving(model_dir, tmp_path / "data", port=port, **options) as server:
        server.wait_until_ready()
        answers = [each.result(SECONDS).sequences[0].tokens for each in pending]
        assert [len(tokens) for tokens in answers] == [200] * 10
        service.holder.close()


def wait_until_it_answers(server: Server) -> httpx.Response:
    while True:
        try:
            return httpx.get(f"{server.url}/api/v1/healthz")
        except httpx.ConnectError:
            assert server.process.poll() is None, server.log
            time.sleep(0.05)
