"""After the warm-up no request of any size compiles anything."""

import time

import httpx
import numpy as np
import pytest
import tinker
from prometheus_client.parser import text_string_to_metric_families

from tests.sdk.examples import SECONDS, batch, drawn, prompt, random_tokens, train
from tests.sdk.server import BASE_MODEL, Server, serving
from tests.sdk.test_processes import work

CONTEXT = 64  # tokens
LENGTHS = [*range(2, CONTEXT, 17), CONTEXT - 1]
WARM_UP_SECONDS = 900
FEW_PROGRAMS = {
    "warm_up": "background",
    "max_context_length": CONTEXT,
    "train_tokens": CONTEXT,
    "decode_rows": 2,
    "sampler_slots": 1,
    "max_lora_adapters": 3,
    "max_lora_rank": 4,
}


@pytest.fixture(scope="module")
def warm_server(model_dir, tmp_path_factory):
    with serving(model_dir, tmp_path_factory.mktemp("warm") / "data", **FEW_PROGRAMS) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def service(warm_server):
    with tinker.ServiceClient(base_url=warm_server.url, api_key="tml-test") as service:
        yield service


def programs(server: Server) -> dict:
    """Once the workers have been told of them."""
    deadline = time.monotonic() + SECONDS
    while (found := httpx.get(f"{server.url}/healthz").json().get("programs")) is None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def wait_until_warm(server: Server) -> None:
    deadline = time.monotonic() + WARM_UP_SECONDS
    while (now := programs(server))["ready"] < now["planned"]:
        assert time.monotonic() < deadline, now
        time.sleep(0.1)


def compiled(server: Server) -> dict[tuple[str, str], int]:
    """How often what has been compiled, or found in the cache."""
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    family = next(family for family in families if family.name == "spmd_tx_compiles")
    return {
        (sample.labels["program"], sample.labels["source"]): sample.value
        for sample in family.samples
        if sample.name == "spmd_tx_compiles_total"
    }


@pytest.mark.timeout(WARM_UP_SECONDS + 300)  # programs are compiled only while nobody else is at work
@pytest.mark.slow
def test_after_the_warm_up_no_request_of_any_size_compiles_anything(warm_server, service):
    wait_until_warm(warm_server)
    before = compiled(warm_server)

    trainers = [service.create_lora_training_client(BASE_MODEL, rank=rank).result(SECONDS) for rank in (4, 2)]
    for number, length in enumerate(LENGTHS):
        train(trainers[number % 2], batch(number, lengths=[length] * (1 + number % 5)))
    train(trainers[0], batch(1, lengths=LENGTHS))
    samplers = [trainer.save_weights_and_get_sampling_client().result(SECONDS) for trainer in trainers]
    answers = [
        sampler.sample(
            prompt(random_tokens(length, seed=1)),
            1 + length % 6,
            drawn(max_tokens=most),
            include_prompt_logprobs=logprobs,
        )
        for sampler in samplers
        for length in LENGTHS
        for most, logprobs in ((1, True), (CONTEXT - length, False))
    ]
    for answer in answers:
        answer.result(SECONDS)
    path = trainers[0].save_state("state").result(SECONDS).path
    service.create_training_client_from_state_with_optimizer(path).result(SECONDS)

    # Something that is not on the menu, whose count says that all before has been counted.
    rare = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    samplers[0].sample(prompt(random_tokens(9, seed=1)), 1, drawn(1), **rare).result(SECONDS)
    deadline = time.monotonic() + SECONDS
    while not (news := compiled(warm_server).keys() - before.keys()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert {program for program, _ in news} == {"prefill with scores"}
    assert {key: count for key, count in compiled(warm_server).items() if key not in news} == before


def test_a_server_ends_in_order_in_the_middle_of_its_warm_up(model_dir, tmp_path):
    with serving(model_dir, tmp_path / "data", **FEW_PROGRAMS) as server:
        server.wait_until_ready()
        assert programs(server)["planned"]
        assert server.terminate() == 0
        assert "worker 0 was killed" not in server.log
        assert "Fatal Python error" not in server.log


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_processes_warm_up_while_they_serve_and_compute_the_same_before_and_after(model_dir, tmp_path):
    options = {"num_processes": 2, "fully_sharded_data_parallel_size": 2, "max_lora_rank": 8}
    with serving(model_dir, tmp_path / "data", **(FEW_PROGRAMS | options)) as server:
        server.wait_until_ready()
        during = work(server)
        wait_until_warm(server)
        before = compiled(server)
        after = work(server)
        assert compiled(server) == before
        assert server.terminate() == 0
    for one, other in zip(during, after, strict=True):
        np.testing.assert_array_equal(one, other)
