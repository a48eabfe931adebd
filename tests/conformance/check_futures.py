"""Checks of the futures: what every method returns, and clients that are not there yet."""

import asyncio
from typing import Any

import pytest
import tinker

from tests.conformance.registry import covers
from tests.conformance.world import DATA, World
from tests.sdk.examples import SECONDS, VOCABULARY, supervised
from tests.sdk.server import BASE_MODEL

WAYS = ("result", "result_async", "future", "coroutine")
DOES = "waits for the server's answer in the thread, in a coroutine, or as a concurrent.futures.Future"
EFFECT = "all four ways give the same, and raise the same error"


def all_ways(make: Any) -> list[Any]:
    """What the four ways to wait give, each of a future of its own."""

    async def awaited(name: str) -> Any:
        future = make()
        return await (getattr(future, name)(SECONDS) if name == "result_async" else getattr(future, name)())

    return [
        make().result(SECONDS),
        asyncio.run(awaited("result_async")),
        make().future().result(SECONDS),
        asyncio.run(awaited("coroutine")),
    ]


@covers(*[f"APIFuture.{way}" for way in WAYS], does=DOES, effect=EFFECT)
def api_future(world: World) -> None:
    outputs = all_ways(lambda: world.trained.forward(DATA, "cross_entropy"))
    assert len({output.metrics["loss:sum"] for output in outputs}) == 1
    bad = [supervised([1, VOCABULARY])]
    for wait in (lambda future: future.result(SECONDS), lambda future: asyncio.run(future.coroutine())):
        with pytest.raises(tinker.RequestFailedError, match=f"target_tokens has {VOCABULARY}"):
            wait(world.trained.forward(bad, "cross_entropy"))


@covers(*[f"AwaitableConcurrentFuture.{way}" for way in WAYS], does=DOES, effect=EFFECT)
def awaitable_concurrent_future(world: World) -> None:
    runs = all_ways(lambda: world.rest.get_training_run(world.trained.model_id))
    assert [run.training_run_id for run in runs] == [world.trained.model_id] * 4
    with pytest.raises(tinker.NotFoundError, match="nobody"):
        world.rest.get_training_run("nobody:train:0").result(SECONDS)


@covers(
    *[f"BackcompatTrainingClientFuture.{way}" for way in WAYS],
    does="waits for the model to be there",
    effect="a TrainingClient that trains. Every method of TrainingClient is checked on such a future, too",
)
def training_client_future(world: World) -> None:
    clients = all_ways(lambda: world.service.create_lora_training_client(BASE_MODEL, rank=2, seed=1))
    assert {type(client) for client in clients} == {tinker.TrainingClient}
    assert len({client.model_id for client in clients}) == 4


@covers(
    *[f"BackcompatSamplingClientFuture.{way}" for way in WAYS],
    does="waits for the sampler to be there",
    effect="a SamplingClient. Every method of SamplingClient is checked on such a future, too",
)
def sampling_client_future(world: World) -> None:
    clients = all_ways(lambda: world.service.create_sampling_client(base_model=BASE_MODEL))
    assert {type(client) for client in clients} == {tinker.SamplingClient}
