"""A request of a new size waits for its program, and nobody else does."""

import time

import httpx
import numpy as np
import pytest
import tinker
from prometheus_client.parser import text_string_to_metric_families

from tests.sdk.examples import SECONDS, batch, drawn, logprobs_of, random_tokens, sample, train
from tests.sdk.server import BASE_MODEL

HELD, LENGTHS = "forward_backward 1x192", [150]
PROMPT = random_tokens(10, seed=0)


@pytest.fixture
def held(server):
    """A file, as long as which is there the program is not compiled."""
    file = server.data_dir.with_name("held")
    file.write_text(HELD)
    yield file
    file.unlink(missing_ok=True)


def client(server):
    return tinker.ServiceClient(base_url=server.url, api_key="tml-test")


def compiling(server):
    return httpx.get(f"{server.url}/healthz").json().get("programs", {}).get("compiling")


def unforeseen(server):
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    return next(each for each in families if each.name == "spmd_tx_unforeseen_compiles").samples[0].value


def everything(trainer, seed):
    """What a bystander does, and gets."""
    loss = train(trainer, batch(seed))
    sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)
    answer = sample(sampler, PROMPT, drawn(max_tokens=12, seed=5))
    return loss, logprobs_of(trainer, batch(seed=9)), answer.tokens, answer.logprobs


def test_a_request_of_a_new_size_holds_up_nobody(live_server, held):
    server, before = live_server, unforeseen(live_server)
    with client(server) as service, client(server) as stranger:
        bystander, twin, stray = (
            each.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
            for each in (service, service, stranger)
        )
        in_peace = everything(twin, seed=0)

        waiting = stray.forward_backward(batch(seed=1, lengths=LENGTHS), "cross_entropy")
        deadline = time.monotonic() + SECONDS
        while compiling(server) != HELD:
            assert time.monotonic() < deadline, "it is not compiled"
            time.sleep(0.05)
        meanwhile = everything(bystander, seed=0)
        assert compiling(server) == HELD
        held.unlink()
        assert len(waiting.result(SECONDS).loss_fn_outputs) == len(LENGTHS)

    for one, other in zip(meanwhile, in_peace, strict=True):
        np.testing.assert_array_equal(one, other)
    assert unforeseen(server) == before
    assert "nobody has ordered" not in server.log
