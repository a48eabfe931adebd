"""Losses that take long to compile or to run: who has sent them waits, and nobody else does."""

import os
import secrets
import shutil

import numpy as np
import pytest
import tinker
from tinker import types

from tests.sdk.examples import SECONDS, batch, prompt, random_tokens, train
from tests.sdk.raw_api import RawApi
from tests.sdk.server import BASE_MODEL, COMPILED, serving

TOKENS = 8
ROUNDS = 6  # of a neighbour; each takes a few hundredths of a second, and a costly loss many seconds
SORTS = 30
PRODUCTS = 20
WIDTH, TOO_WIDE = 400, 640  # of the matrices


def node(target, *args, op="call_function", name, **kwargs):
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def ref(name):
    return {"ref": name}


def definition(nodes, last):
    """The loss is the sum of the logprobs times the mean of the last node; ``w`` is [T, K]."""
    output = {"tuple": [ref("loss"), {"dict": {}}]}
    return {
        "name": "costly",
        "inputs": [{"name": "logprobs", "rank": 1}, {"name": "w", "rank": 2}],
        "graph": {
            "nodes": [
                node("logprobs", op="placeholder", name="logprobs"),
                node("w", op="placeholder", name="w"),
                *nodes,
                node("torch.mean", ref(last), name="mean"),
                node("torch.sum", ref("logprobs"), name="sum"),
                node("operator.mul", ref("sum"), ref("mean"), name="loss"),
                node("output", output, op="output", name="output"),
            ]
        },
    }


def slow_to_compile():
    """No two runs of this test find the other's programs in a cache."""
    nodes = [
        node("torch.unsqueeze", ref("logprobs"), 1, name="column"),
        node("operator.add", ref("w"), ref("column"), name="added"),
        node("operator.mul", ref("added"), 1 + secrets.randbelow(10**9) / 10**9, name="sin_0"),
    ]
    for number in range(SORTS):
        nodes += [
            node("torch.sort", ref(f"sin_{number}"), -1, name=f"sort_{number}"),
            node("operator.getitem", ref(f"sort_{number}"), 0, name=f"sorted_{number}"),
            node("torch.sin", ref(f"sorted_{number}"), name=f"sin_{number + 1}"),
        ]
    return definition(nodes, f"sin_{SORTS}"), range(4, 10)


def slow_to_run():
    nodes = [
        node("torch.t", ref("w"), name="turned"),
        node("torch.matmul", ref("turned"), ref("w"), name="matrix"),
        node("operator.mul", ref("matrix"), 1.0, name="product_0"),
    ]
    for number in range(PRODUCTS):
        nodes.append(
            node("torch.matmul", ref(f"product_{number}"), ref("matrix"), name=f"product_{number + 1}")
        )
    return definition(nodes, f"product_{PRODUCTS}"), [WIDTH] * 150


def data(widths):
    """A datum for each width of its input ``w``."""
    data = []
    for width in widths:
        tokens = random_tokens(TOKENS, width)
        values = types.TensorData(data=[1 / WIDTH] * TOKENS * width, dtype="float32", shape=[TOKENS, width])
        data.append(
            types.Datum(
                model_input=prompt(tokens),
                loss_fn_inputs={
                    "target_tokens": types.TensorData(data=tokens, dtype="int64", shape=[TOKENS]),
                    "w": values,
                },
            )
        )
    return data


def create(client, server, graph):
    api = RawApi(server.url, BASE_MODEL)
    body = {"session_id": client.holder.get_session_id(), "custom_loss_seq_id": 0, **graph}
    loss_id = api.retrieve(api.post("create_custom_loss", **body)["request_id"]).json()["loss_id"]
    api.close()
    return loss_id


@pytest.fixture(scope="module")
def own_server(model_dir, tmp_path_factory):
    """It ends in the middle of what it does, and what it has compiled goes with it."""
    data_dir = tmp_path_factory.mktemp("costly") / "data"
    COMPILED.mkdir(parents=True, exist_ok=True)
    shutil.copytree(COMPILED, data_dir / "compilation_cache", copy_function=os.symlink)
    with serving(model_dir, data_dir, drain_seconds=0) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture
def tenants(own_server):
    """A greedy one and a neighbour."""
    clients = [tinker.ServiceClient(base_url=own_server.url, api_key="tml-test") for _ in range(2)]
    yield clients
    for client in clients:
        client.holder.close()


@pytest.mark.parametrize("loss", [slow_to_compile, slow_to_run])
def test_neighbours_train_and_sample_while_a_costly_loss_is_compiled_and_run(own_server, tenants, loss):
    greedy, neighbour = tenants
    trainers = [
        each.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS) for each in tenants
    ]
    sampler = neighbour.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)

    def go_on() -> list[int]:
        params = types.SamplingParams(max_tokens=4, seed=1)
        drawn = sampler.sample(prompt(random_tokens(9, 0)), 1, params).result(SECONDS)
        assert np.isfinite(train(trainers[1], batch(0)))
        return drawn.sequences[0].tokens

    in_peace = go_on()  # which compiles what it needs
    graph, widths = loss()
    costly = trainers[0].forward_backward(
        data(widths), "custom", {"loss_id": create(greedy, own_server, graph)}
    )
    for _ in range(ROUNDS):
        assert go_on() == in_peace
    assert not costly.future().done()


def test_what_takes_too_much_arithmetic_is_refused_with_the_bound_and_the_client_goes_on(own_server, tenants):
    client, _ = tenants
    trainer = client.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
    loss_id = create(client, own_server, slow_to_run()[0])
    failing = trainer.forward_backward(data([TOO_WIDE]), "custom", {"loss_id": loss_id})
    bound = "datum 0: .* at most 10,000,000,000 are allowed .the limit custom_loss_datum_operations."
    with pytest.raises(tinker.RequestFailedError, match=bound):
        failing.result(SECONDS)
    assert np.isfinite(train(trainer, batch(0)))
