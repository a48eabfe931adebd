"""What the checks work with: a server with keys, two accounts, and small things that they share."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import tinker

from tests.sdk.examples import ADAM_STEP, SECONDS, batch, random_tokens, train
from tests.sdk.server import BASE_MODEL, Server

DATA = batch(seed=0, lengths=(12, 7))
PROMPT = random_tokens(10, seed=3)


@dataclass
class World:
    """Shared by all checks: whoever changes a thing makes one of their own."""

    server: Server
    seeing_server: Server  # of a model that takes images, without keys
    model_dir: Path
    key: str
    stranger_key: str
    as_future: bool = False  # whether methods are called on the future of a client, not on the client
    _numbers: Iterator[int] = field(default_factory=lambda: iter(range(10**6)))

    @cached_property
    def service(self) -> tinker.ServiceClient:
        return self.new_service()

    @cached_property
    def seeing_service(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.seeing_server.url, api_key=self.key)

    @cached_property
    def rest(self) -> tinker.RestClient:
        return tinker.RestClient(base_url=self.server.url, api_key=self.key)

    @cached_property
    def admin(self) -> tinker.AdminClient:
        return tinker.AdminClient(base_url=self.server.url, api_key=self.key)

    @cached_property
    def stranger(self) -> tinker.ServiceClient:
        return self.new_service(self.stranger_key)

    @cached_property
    def stranger_rest(self) -> tinker.RestClient:
        return tinker.RestClient(base_url=self.server.url, api_key=self.stranger_key)

    @cached_property
    def trained(self) -> tinker.TrainingClient:
        """One step away from the base model; nobody trains it further."""
        trainer = self.service.create_lora_training_client(BASE_MODEL, rank=4, seed=5).result(SECONDS)
        train(trainer, DATA, adam=ADAM_STEP)
        return trainer

    @cached_property
    def state_path(self) -> str:
        return self.trained.save_state("shared", user_metadata={"of": "world"}).result(SECONDS).path

    @cached_property
    def sampler_path(self) -> str:
        return self.trained.save_weights_for_sampler("shared").result(SECONDS).path

    @cached_property
    def base_sampler(self) -> tinker.SamplingClient:
        return self.service.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)

    def new_service(self, key: str | None = None, **more: Any) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.server.url, api_key=key or self.key, **more)

    def new_trainer(self, seed: int = 5) -> Any:
        """A TrainingClient, or the future of one; those with the same seed start the same."""
        return self.maybe_awaited(self.service.create_lora_training_client(BASE_MODEL, rank=4, seed=seed))

    def new_seeing_trainer(self) -> Any:
        """The same, of the model that takes images."""
        return self.maybe_awaited(self.seeing_service.create_lora_training_client(BASE_MODEL, rank=4, seed=5))

    def new_sampler(self, path: str | None = None) -> Any:
        """A SamplingClient of a checkpoint or of the base model, or the future of one."""
        base_model = BASE_MODEL if path is None else None
        create = self.service.create_sampling_client
        return self.maybe_awaited(create(model_path=path, base_model=base_model))

    def listed(self, path: str) -> tinker.Checkpoint:
        """A checkpoint as its run's list shows it."""
        run_id = path.removeprefix("tinker://").split("/")[0]
        listed = self.rest.list_checkpoints(run_id).result(SECONDS).checkpoints
        (found,) = [each for each in listed if each.tinker_path == path]
        return found

    def expiry_of(self, path: str) -> datetime:
        """When it will be deleted; it is not one that is kept."""
        expires_at = self.listed(path).expires_at
        assert expires_at is not None
        return expires_at

    def post(self, path: str, body: dict) -> dict:
        """Without the SDK, for what it would not send."""
        headers = {"x-api-key": self.key}
        answer = httpx.post(f"{self.server.url}/api/v1/{path}", json=body, headers=headers, timeout=SECONDS)
        return answer.json()

    def failure(self, answer: dict) -> str:
        """Why a request was refused, at once or through its future."""
        if "request_id" in answer:
            answer = self.post("retrieve_future", {"request_id": answer["request_id"]})
        return answer["error"]

    def maybe_awaited(self, future: Any) -> Any:
        return future if self.as_future else future.result(SECONDS)

    def new_name(self) -> str:
        return f"check-{next(self._numbers)}"

    def close(self) -> None:
        for name in ("service", "seeing_service", "stranger"):
            if name in self.__dict__:
                getattr(self, name).close("success").result(SECONDS)


def twins(client: object, name: str) -> list[Callable[..., Any]]:
    """A method and its asynchronous twin, both as functions that return the final value."""
    return [settled(getattr(client, name)), settled(getattr(client, f"{name}_async"))]


def settled(method: Callable[..., Any]) -> Callable[..., Any]:
    """Call it and wait, however many awaits that takes."""

    def call(*arguments: Any, **options: Any) -> Any:
        value = method(*arguments, **options)
        if isinstance(value, tinker.APIFuture):
            return value.result(SECONDS)
        return asyncio.run(_all(value)) if isinstance(value, Awaitable) else value

    return call


async def _all(value: Awaitable[Any]) -> Any:
    result = await value
    return await result.result_async(SECONDS) if isinstance(result, tinker.APIFuture) else result
