"""Saves of a model: to continue training, to sample from, or to download."""

import asyncio
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from spmd_tx.coordinator.catalog.catalog import Catalog, SamplerWeights
from spmd_tx.coordinator.checkpoints import age_recipients
from spmd_tx.coordinator.checkpoints.catalog import CheckpointCatalog, SaveOptions
from spmd_tx.coordinator.checkpoints.checkpoint_base import CheckpointBase
from spmd_tx.coordinator.checkpoints.writes import Writes, Writing, written_after
from spmd_tx.coordinator.requests.records import Failed, Outcome, Request, json_result, read_body
from spmd_tx.coordinator.runtime.owner_turns import OwnerTurns
from spmd_tx.coordinator.sampling.versions import Versions
from spmd_tx.coordinator.storage.disk import size_of
from spmd_tx.coordinator.training.model import TrainedModel
from spmd_tx.coordinator.training.outcomes import Begun, at_once
from spmd_tx.coordinator.wire import training
from spmd_tx.coordinator.wire.checkpoint_paths import (
    EXTERNAL_WEIGHTS,
    SAMPLER_WEIGHTS,
    WEIGHTS,
    CheckpointPath,
)
from spmd_tx.coordinator.wire.checkpoints import SaveWeightsExternalRequest, SaveWeightsExternalResult
from spmd_tx.errors import ForeignCodeFailed, InvalidRequest
from spmd_tx.processes.child import Allowance, call_outside
from spmd_tx.protocol.commands import AnyCommand, Move
from spmd_tx.protocol.places import BankSlot, StateFolder, TrainSlot, WeightsFolder
from spmd_tx.protocol.programs import program_of_move
from spmd_tx.protocol.reports import Reply

ENCRYPTION = "spmd_tx.coordinator.checkpoints.age"  # runs in a child process only
CHECK_SECONDS = 60.0
SLOWEST_BYTES_PER_SECOND = 5e6  # of encryption and writing on a busy machine
SAVE_STATE, SAVE_SAMPLER = program_of_move(TrainSlot, StateFolder), program_of_move(TrainSlot, BankSlot)


@dataclass(frozen=True)
class Saves:
    """Prepares the steps of saves. Each method raises RequestError before anything is sent."""

    checkpoints: CheckpointCatalog
    base: CheckpointBase
    samplers: Catalog
    versions: Versions
    writes: Writes
    children: OwnerTurns  # processes at a time

    async def begin(self, model: TrainedModel, request: Request, body: bytes) -> Begun:
        """Prepare a save of any kind."""
        if request.kind == "save_weights":
            return await self.state(model, request, read_body(body, training.SaveWeightsRequest))
        if request.kind == "save_weights_external":
            return await self.external(model, request, read_body(body, SaveWeightsExternalRequest))
        save = read_body(body, training.SaveWeightsForSamplerRequest)
        if save.path is None:
            return await self.ephemeral(model, request, save)
        return await self.named(model, request, save, save.path)

    async def state(self, model: TrainedModel, request: Request, body: training.SaveWeightsRequest) -> Begun:
        path = CheckpointPath(model.id, WEIGHTS, body.path or f"request-{request.seq_id}")
        options = _options(request, body)
        staged = (await self.checkpoints.begin(path, options)).absolute()
        adapter = model.adapter

        reply = model.put_later(
            lambda: [Move(source=TrainSlot(model.slot), target=StateFolder(str(staged)), adapter=adapter)],
            lambda: [SAVE_STATE],
        )

        async def outcome() -> Outcome:
            await reply
            await self.checkpoints.complete(path, staged, model.adapter, options, self.base)
            return json_result(training.SaveWeightsResult(str(path)))

        return Begun(outcome, next_waits=True)

    async def named(
        self,
        model: TrainedModel,
        request: Request,
        body: training.SaveWeightsForSamplerRequest,
        name: str,
    ) -> Begun:
        path = CheckpointPath(model.id, SAMPLER_WEIGHTS, name)
        options = _options(request, body)
        staged = (await self.checkpoints.begin(path, options)).absolute()
        writing = self.writes.expect(staged)
        reply = self._to_bank(model, version=request.id, path=str(staged))

        async def outcome() -> Outcome:
            if (failed := await _written(reply, writing, staged)) is not None:
                return failed
            await self.checkpoints.complete(path, staged, model.adapter, options, self.base)
            folder, _ = await self.checkpoints.open(path, self.base)
            self.versions.publish(path, request.id, model.adapter, folder)
            return json_result(training.SaveWeightsForSamplerResult(path=str(path)))

        return Begun(outcome, next_waits=True)

    async def external(
        self, model: TrainedModel, request: Request, body: SaveWeightsExternalRequest
    ) -> Begun:
        recipients = age_recipients.check_recipients(body.age_encryption_recipients or [])
        outside = partial(self._outside, model.tenant, recipients=recipients)
        if recipients and (failed := await outside("check", CHECK_SECONDS)):
            return Begun(partial(at_once, failed))
        path = CheckpointPath(model.id, EXTERNAL_WEIGHTS, body.path)
        options = SaveOptions(ttl_seconds=body.ttl_seconds, request_id=request.id, seq_id=request.seq_id)
        staged = (await self.checkpoints.begin(path, options)).absolute()
        adapter = model.adapter
        writing = self.writes.expect(staged)
        reply = model.put_later(
            lambda: [Move(source=TrainSlot(model.slot), target=WeightsFolder(str(staged)), adapter=adapter)],
            lambda: [SAVE_SAMPLER],
        )

        async def outcome() -> Outcome:
            if (failed := await _written(reply, writing, staged)) is not None:
                return failed
            if recipients:
                seconds = await asyncio.to_thread(_seconds_to_encrypt, staged)
                failed = await outside("encrypt", seconds, folder=str(staged))
                if failed is not None:
                    await asyncio.to_thread(shutil.rmtree, staged, ignore_errors=True)
                    return failed
            manifest = await self.checkpoints.complete(path, staged, model.adapter, options, self.base)
            return json_result(SaveWeightsExternalResult(str(path), manifest.size_bytes))

        return Begun(outcome, next_waits=True)

    async def ephemeral(
        self, model: TrainedModel, request: Request, body: training.SaveWeightsForSamplerRequest
    ) -> Begun:
        if body.sampling_session_seq_id is None:
            raise InvalidRequest(
                "neither path nor sampling_session_seq_id is set; name the checkpoint with path"
            )
        inflight = body.kind == "inflight"
        sampler = await self.samplers.add_sampler(
            model.session_id,
            body.sampling_session_seq_id,
            self.base.name,
            SamplerWeights(model_id=model.id, version=request.id, inflight=inflight),
        )
        republishes = request.seq_id if inflight else None
        reply = self._to_bank(model, sampler.id, None, of=model.id, republishes=republishes)

        async def outcome() -> Outcome:
            await reply
            if inflight:
                self.versions.store.note_saved(model.id, model.session_id, request.seq_id)
            return json_result(training.SaveWeightsForSamplerResult(sampling_session_id=sampler.id))

        return Begun(outcome)

    async def _outside(
        self, tenant: str, function: str, seconds: float, **arguments: object
    ) -> Failed | None:
        """Call the age library in a child process; return the failure if that process does not survive."""
        try:
            async with self.children.turn(tenant):
                await call_outside(f"{ENCRYPTION}:{function}", arguments, Allowance(seconds))
        except ForeignCodeFailed as error:
            return Failed(f"the files cannot be encrypted: {error}", "server")
        return None

    def _to_bank(
        self,
        model: TrainedModel,
        version: str,
        path: str | None,
        of: str | None = None,
        republishes: int | None = None,
    ) -> asyncio.Future[Reply]:
        """Save to the sampler bank. The slot is chosen when the command is sent, so that it is free by then.

        ``republishes`` is the seq_id of a save of kind inflight.
        """
        adapter = model.adapter  # a following load may change it before this is sent

        def commands() -> list[AnyCommand]:
            place = self.versions.reserve(version, adapter, model.session_id, of)
            if republishes is not None:
                self.versions.inflight.publish(model.id, republishes, version)
            also = WeightsFolder(path) if path is not None else of and self.versions.aside(version, of)
            save = Move(
                source=TrainSlot(model.slot), target=BankSlot(place.bank), adapter=adapter, also=also or None
            )
            return [*place.before, save]

        return model.put_later(
            commands, lambda: [SAVE_SAMPLER, *self.versions.bank.programs_to_reserve(version)]
        )


def _options(
    request: Request, body: training.SaveWeightsRequest | training.SaveWeightsForSamplerRequest
) -> SaveOptions:
    return SaveOptions(
        body.overwrite, body.ttl_seconds, body.user_metadata, request.id, seq_id=request.seq_id
    )


async def _written(reply: asyncio.Future[Reply], writing: Writing, staged: Path) -> Failed | None:
    """Wait until a folder is complete; return the failure if it could not be written."""
    problem = await written_after(reply, writing)
    if problem is None:
        return None
    await asyncio.to_thread(shutil.rmtree, staged, ignore_errors=True)
    return Failed(f"the files could not be written: {problem}", "server")


def _seconds_to_encrypt(folder: Path) -> float:
    return CHECK_SECONDS + size_of(folder) / SLOWEST_BYTES_PER_SECOND
