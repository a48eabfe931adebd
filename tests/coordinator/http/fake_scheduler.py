"""Answers every request at once, in the order of arrival, with results that are easy to recognize."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from spmd_tx.coordinator.bases.bases import Bases
from spmd_tx.coordinator.catalog.catalog import Catalog, SamplerWeights
from spmd_tx.coordinator.checkpoints.catalog import CheckpointCatalog, SaveOptions
from spmd_tx.coordinator.requests.queue import RequestQueue
from spmd_tx.coordinator.requests.records import Failed, Finished, Outcome, QueueStatus, Request
from spmd_tx.coordinator.tenancy.spent import Usage
from spmd_tx.coordinator.training import custom_loss_catalog
from spmd_tx.coordinator.wire import (
    checkpoint_paths,
    sampling,
    sampling_protobuf,
    training,
    training_protobuf,
)
from spmd_tx.coordinator.wire.checkpoint_paths import (
    EXTERNAL_WEIGHTS,
    SAMPLER_WEIGHTS,
    WEIGHTS,
    CheckpointPath,
)
from spmd_tx.coordinator.wire.checkpoints import SaveWeightsExternalRequest, SaveWeightsExternalResult
from spmd_tx.coordinator.wire.sampling_protobuf import PromptScores
from spmd_tx.coordinator.wire.training_protobuf import JSON, PROTOBUF
from spmd_tx.errors import RequestError
from spmd_tx.group_names import MAIN

LOGPROB = -0.25  # of every token
DRAWN_TOKEN = 7


class FakeScheduler:
    def __init__(
        self, queue: RequestQueue, catalog: Catalog, checkpoints: CheckpointCatalog, bases: Bases
    ) -> None:
        self.arrived: list[Request] = []
        self.ended_sessions: list[str] = []
        self.cancelled: list[str] = []
        self.retired: list[str] = []
        self.consumed: list[tuple[str, int]] = []
        self.is_paused = False
        self.elsewhere: dict[str, str] = {}  # groups, by requests
        self._queue, self._catalog, self._checkpoints, self._bases = queue, catalog, checkpoints, bases
        self._inbox: asyncio.Queue[Request] = asyncio.Queue()
        self._held: list[Request] = []  # while it was paused

    def arrive(self, request: Request) -> None:
        self.arrived.append(request)
        if self.is_paused:
            self._held.append(request)
        else:
            self._inbox.put_nowait(request)

    def resume(self) -> None:
        """Answer what came while it was paused, and go on."""
        self.is_paused = False
        for request in self._held:
            self._inbox.put_nowait(request)
        self._held.clear()

    def consume(self, model_id: str, seq_id: int) -> None:
        self.consumed.append((model_id, seq_id))

    def session_ended(self, session_id: str) -> None:
        self.ended_sessions.append(session_id)

    def status(self, request_id: str) -> QueueStatus:
        if self.is_paused:
            return QueueStatus("paused_capacity", "all adapters are in use")
        return QueueStatus("active", None)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def group_of(self, request: Request) -> str | None:
        return self.elsewhere.get(request.id, MAIN)

    def retire(self, samplers: Mapping[str, str]) -> None:
        self.retired += samplers

    async def run(self) -> None:
        while True:
            request = await self._inbox.get()
            payload = await self._queue.payload(request)
            try:
                outcome = await self._execute(request, payload)
            except RequestError as error:
                outcome = Failed(str(error), "user")
            self._queue.resolve(request.id, outcome)

    async def _execute(self, request: Request, payload: bytes) -> Outcome:
        match request.kind:
            case "create_model":
                return _json(training.CreateModelResult(request.line))
            case "load_weights":
                load = msgspec.json.decode(payload, type=training.LoadWeightsRequest)
                model = await self._catalog.model(request.line)
                base = self._bases.of_row(model.base_model).checkpoints
                await self._checkpoints.open(checkpoint_paths.parse(load.path), base)
                return _json(training.LoadWeightsResult(load.path, request.line))
            case "forward_backward" | "forward":
                return _losses(training_protobuf.decode_forward_backward(payload))
            case "optim_step":
                step = msgspec.json.decode(payload, type=training.OptimStepRequest)
                assert step.adam_params is not None
                return _json(training.OptimStepResult({"learning_rate": step.adam_params.learning_rate}))
            case "save_weights":
                save = msgspec.json.decode(payload, type=training.SaveWeightsRequest)
                options = _options(request, save)
                path = CheckpointPath(request.line, WEIGHTS, save.path or "")
                await self._save(path, options)
                return _json(training.SaveWeightsResult(str(path)))
            case "save_weights_for_sampler":
                return await self._save_for_sampler(request, payload)
            case "save_weights_external":
                export = msgspec.json.decode(payload, type=SaveWeightsExternalRequest)
                path = CheckpointPath(request.line, EXTERNAL_WEIGHTS, export.path)
                await self._save(path, SaveOptions(ttl_seconds=export.ttl_seconds, seq_id=request.seq_id))
                return _json(SaveWeightsExternalResult(str(path), len(b"weights")))
            case "create_custom_loss":
                return custom_loss_catalog.created(request)
            case "copy_weights":
                raise AssertionError("it is done at once")
            case "sample":
                return _samples(msgspec.json.decode(payload, type=sampling.SampleRequest))

    async def _save_for_sampler(self, request: Request, payload: bytes) -> Outcome:
        save = msgspec.json.decode(payload, type=training.SaveWeightsForSamplerRequest)
        if save.path is not None:
            path = CheckpointPath(request.line, SAMPLER_WEIGHTS, save.path)
            await self._save(path, _options(request, save))
            return _json(training.SaveWeightsForSamplerResult(path=str(path)))
        model = await self._catalog.model(request.line)
        assert save.sampling_session_seq_id is not None
        sampler = await self._catalog.add_sampler(
            request.session_id,
            save.sampling_session_seq_id,
            model.base_model,
            SamplerWeights(model_id=model.id, inflight=save.kind == "inflight"),
        )
        return _json(training.SaveWeightsForSamplerResult(sampling_session_id=sampler.id))

    async def _save(self, path: CheckpointPath, options: SaveOptions) -> None:
        model = await self._catalog.model(path.run_id)
        partial = await self._checkpoints.begin(path, options)
        _write_weights(partial)
        base = self._bases.of_row(model.base_model).checkpoints
        await self._checkpoints.complete(path, partial, model.adapter, options, base)


def _write_weights(folder: Path) -> None:
    (folder / "shards").mkdir(parents=True)
    (folder / "shards" / "0.bin").write_bytes(b"weights")


def _options(
    request: Request, save: training.SaveWeightsRequest | training.SaveWeightsForSamplerRequest
) -> SaveOptions:
    return SaveOptions(save.overwrite, save.ttl_seconds, save.user_metadata, seq_id=request.seq_id)


def _json(result: msgspec.Struct) -> Finished:
    return Finished(JSON, msgspec.json.encode(result))


def _losses(request: training_protobuf.ForwardBackwardRequest) -> Outcome:
    problems = [datum.problem for datum in request.data if datum.problem]
    if problems:
        return Failed(problems[0], "user")
    logprobs = [np.full(len(datum.tokens), LOGPROB, np.float32) for datum in request.data]
    metrics = {"loss:sum": -float(sum(array.sum() for array in logprobs))}
    tokens = sum(map(len, logprobs))
    spent = Usage(forwarded=tokens) if request.forward_only else Usage(trained=tokens)
    return Finished(
        PROTOBUF, training_protobuf.encode_forward_backward_output(logprobs, metrics), spent=spent
    )


def _samples(request: sampling.SampleRequest) -> Outcome:
    count = request.sampling_params.max_tokens or 1
    sequence = sampling_protobuf.SampledSequence([DRAWN_TOKEN] * count, [LOGPROB] * count, "length")
    length = sum(len(chunk.tokens or []) for chunk in request.prompt.chunks)
    prompt_logprobs = np.full(length, LOGPROB, np.float32)
    prompt_logprobs[0] = np.nan
    body = sampling_protobuf.encode_sample_response(
        [sequence] * request.num_samples,
        PromptScores(prompt_logprobs if request.prompt_logprobs else None),
    )
    return Finished(PROTOBUF, body, spent=Usage(prompt=length, sampled=count * request.num_samples))
