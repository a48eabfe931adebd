"""Executes training requests: from a body to commands, and from their replies to an outcome."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spmd_tx.coordinator.catalog.catalog import Catalog, sampler_id
from spmd_tx.coordinator.checkpoints import files
from spmd_tx.coordinator.checkpoints.catalog import CheckpointCatalog
from spmd_tx.coordinator.checkpoints.checkpoint_base import CheckpointBase
from spmd_tx.coordinator.checkpoints.snapshots import Snapshots, StoredSnapshot
from spmd_tx.coordinator.images.pool import ImagePool
from spmd_tx.coordinator.images.seen import RequestImages, SeenImages
from spmd_tx.coordinator.requests.records import (
    CHUNKED_KINDS,
    Failed,
    Outcome,
    Request,
    RequestKind,
    json_result,
    read_body,
)
from spmd_tx.coordinator.runtime.byte_budget import ByteBudget
from spmd_tx.coordinator.runtime.owner_turns import OwnerTurns
from spmd_tx.coordinator.runtime.threads import SMALL_BYTES, compute
from spmd_tx.coordinator.sampling.routing_notes import RoutingFiles
from spmd_tx.coordinator.sampling.stability_notes import StabilityFiles
from spmd_tx.coordinator.sampling.versions import Versions, WriteOut, check_rank
from spmd_tx.coordinator.training import custom_loss
from spmd_tx.coordinator.training.batching import PackedRequest, pack
from spmd_tx.coordinator.training.custom_loss_catalog import CustomLossCatalog
from spmd_tx.coordinator.training.custom_loss_runs import LossRuns
from spmd_tx.coordinator.training.images import check_room, see, with_room
from spmd_tx.coordinator.training.model import TrainedModel
from spmd_tx.coordinator.training.optimizers import OptimizerStep, of_loaded, step_of
from spmd_tx.coordinator.training.outcomes import (
    Begun,
    all_written,
    at_once,
    check_loaded,
    closing,
    json_after,
    outcome_of_loss,
    outcome_of_step,
)
from spmd_tx.coordinator.training.packing import TrainingShapes
from spmd_tx.coordinator.training.saves import SAVE_STATE, Saves
from spmd_tx.coordinator.training.slots import TrainingSlots
from spmd_tx.coordinator.training.validation import (
    adapter_seed,
    check_forward_backward,
    check_lora,
    with_ones,
    without_image_targets,
)
from spmd_tx.coordinator.wire import training
from spmd_tx.coordinator.wire.checkpoint_paths import parse_to_train
from spmd_tx.coordinator.wire.limits import Limits
from spmd_tx.coordinator.wire.training_protobuf import ForwardBackwardRequest, decode_forward_backward
from spmd_tx.custom_loss.limits import LossLimits
from spmd_tx.errors import ForeignCodeFailed, InvalidRequest, LossGivenUp, NotLoaded
from spmd_tx.protocol.commands import AdapterSpec, AnyCommand, Drop, Move
from spmd_tx.protocol.places import Fresh, StateFolder, TrainSlot
from spmd_tx.protocol.programs import ProgramShape, program_of_move
from spmd_tx.protocol.reports import Reply

logger = logging.getLogger(__name__)

# Kinds without effect on the model's state
WITHOUT_EFFECT = frozenset({"forward", "save_weights", "save_weights_external"})

PACKED_BYTES = 192 << 20  # for large requests of all models, from decoding until their results are known
PACKED = 4  # factor by which a body grows when it is decoded and packed
CHILDREN, CHILDREN_OF_ONE = 4, 2  # processes at a time that encrypt exports, of all tenants and of each
BEGUN_AT_ONCE = 16  # chunked requests, large or small
CREATE = program_of_move(Fresh, TrainSlot)
LOAD_STATE = program_of_move(StateFolder, TrainSlot)
NOT_WRITTEN_OUT = (
    "the weights were loaded, but unnamed weights that were saved for sampling before could not be written "
    "to disk, and would be lost if the workers had to start again"
)


@dataclass(frozen=True)
class Training:
    """Turns each request of a model into steps of that model."""

    checkpoints: CheckpointCatalog
    base: CheckpointBase
    samplers: Catalog
    versions: Versions
    slots: TrainingSlots
    limits: Limits
    shapes: TrainingShapes
    snapshots: Snapshots
    stability: StabilityFiles
    custom_losses: CustomLossCatalog
    loss_runs: LossRuns
    routing: RoutingFiles | None = None  # None: the model has no experts
    images: RequestImages | None = None  # None: the model takes text alone
    pool: ImagePool = field(default_factory=ImagePool)  # of images' tokens on the devices
    room: ByteBudget = field(default_factory=lambda: ByteBudget(PACKED_BYTES))  # for requests that are packed
    children: OwnerTurns = field(default_factory=lambda: OwnerTurns(CHILDREN, CHILDREN_OF_ONE))
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(BEGUN_AT_ONCE))
    loss_room: ByteBudget = field(default_factory=lambda: ByteBudget(PACKED_BYTES))  # with a custom loss

    def turn(self, kind: RequestKind) -> AbstractAsyncContextManager[object]:
        """Return the block in which a request's body is read and its steps are made: few bodies in memory."""
        return self.turns if kind in CHUNKED_KINDS else nullcontext()

    async def begin(
        self,
        model: TrainedModel,
        request: Request,
        body: bytes,
        layout: str | None = None,
        *,
        is_again: bool = False,
    ) -> Begun:
        """Prepare a request's steps. Raises RequestError, before any command with an effect is sent.

        ``layout`` is how its micro-batches were cut the first time, if it was run before and that is known.
        """
        if model.refusal is not None:
            raise InvalidRequest(model.refusal)
        model.request_id = request.id
        match request.kind:
            case "create_model":
                return self._create(model, read_body(body, training.CreateModelRequest))
            case "load_weights":
                return await self._load(model, request, read_body(body, training.LoadWeightsRequest))
            case "forward" | "forward_backward":
                size = 0 if len(body) < SMALL_BYTES else PACKED * len(body)
                with ExitStack() as held:
                    held.callback(self.room.give_back, await self.room.take(size))
                    sent = await compute(len(body), decode_forward_backward, body)
                    if sent.loss_fn != custom_loss.LOSS:
                        begun = await self._loss(model, sent, layout)
                    elif is_again:
                        begun = await self._custom(model, request, sent, layout, limits=None)
                    else:
                        if size:  # it may wait for long, and is read again then
                            sent, body = None, b""
                        begun = await self._custom_in_turn(model, request, sent, size, held)
                    return Begun(partial(closing, held.pop_all(), begun.outcome), begun.next_waits)
            case "optim_step":
                step = read_body(body, training.OptimStepRequest)
                return self._optim_step(model, step_of(step, model.adapter, is_again=is_again))
            case "save_weights" | "save_weights_for_sampler" | "save_weights_external":
                base, writes = self.base, self.snapshots.writes
                saves = Saves(self.checkpoints, base, self.samplers, self.versions, writes, self.children)
                return await saves.begin(model, request, body)
            case "sample" | "copy_weights" | "upload_weights" | "create_custom_loss":
                raise AssertionError(f"a {request.kind} request has no place in a line")

    async def _loss(self, model: TrainedModel, sent: ForwardBackwardRequest, layout: str | None) -> Begun:
        seen = await see(self.images, model, sent)
        shapes = with_room(self.shapes.as_recorded(layout), seen, self.pool)
        pack = partial(self._pack, model, is_again=layout is not None, seen=seen)
        packed = await compute(self._size(sent), pack, sent, shapes)
        outputs = model.put_chunks(packed.chunks)
        return Begun(partial(outcome_of_loss, packed, outputs, shapes.layout))

    async def begin_again(
        self, model: TrainedModel, request: Request, body: bytes, layout: str | None
    ) -> Begun | None:
        """Replay a request with an effect and a known outcome; None when the state does not need it."""
        if self.shapes.has_other_kernels(layout):
            logger.warning(
                "request %s was executed with other kernels (%s); its sums may differ", request.id, layout
            )
        if request.kind == "save_weights_for_sampler":
            save = read_body(body, training.SaveWeightsForSamplerRequest)
            if save.path is not None:
                return None
            assert save.sampling_session_seq_id is not None
            version = sampler_id(model.session_id, save.sampling_session_seq_id)
            self.versions.inflight.answered(model.id, request.seq_id)
            if save.kind == "snapshot" and await self.versions.find_on_disk(version, model.session_id):
                return None
        return await self.begin(model, request, body, layout, is_again=True)

    async def restore(self, model: TrainedModel, snapshot: StoredSnapshot) -> None:
        """Put a model into the state of a snapshot. Raises InvalidRequest or NotLoaded if it is another's."""
        if (not snapshot.adapter.rank) != (not self.limits.max_rank):
            raise InvalidRequest(
                "it was trained with --full-parameters, and the server runs without"
                if self.limits.max_rank
                else "it is a LoRA adapter, and the server runs with --full-parameters"
            )
        model.become(snapshot.adapter)

        def load() -> list[AnyCommand]:
            return [_load_state(model.slot, snapshot.path, snapshot.adapter, optimizer=snapshot.optimizer)]

        check_loaded(await model.put_later(load, lambda: [LOAD_STATE], fills_slot=True))

    def take_snapshot(self, model: TrainedModel, seq_id: int) -> Coroutine[Any, Any, str | None]:
        """Snapshot the state after all steps so far; the coroutine waits for the files or returns the error.

        Versions that are only on the device are written to disk before: replay from the snapshot could not
        make them again.
        """
        adapter, writing = model.adapter, self.snapshots.begin(model.id, seq_id)
        path = self.snapshots.staged(model.id, seq_id)
        model.request_id = ""

        def snapshot() -> Move:
            source, target = TrainSlot(model.slot), StateFolder(str(path))
            return Move(source=source, target=target, adapter=adapter, in_background=True)

        return all_written(*self._put_behind_versions(model, snapshot, SAVE_STATE), writing)

    async def write_out(self, model: TrainedModel) -> str | None:
        """Write a model's versions to disk that only devices have; return why one could not be written."""
        out = WriteOut(self.versions, model.id)
        of_request, model.request_id = model.request_id, ""  # a step of the server's own
        reply = model.put_later(lambda: out.commands() or [Drop(places=[])], out.programs, needs_slot=False)
        model.request_id = of_request
        await reply
        return await out.problem()

    def _create(self, model: TrainedModel, body: training.CreateModelRequest) -> Begun:
        adapter = check_lora(body.lora_config, body.optimizer_config, self.limits)
        model.become(adapter)
        seed = adapter_seed(body.lora_config, model.id)

        reply = model.put_later(
            lambda: [Move(source=Fresh(seed), target=TrainSlot(model.slot), adapter=adapter)],
            lambda: [CREATE],
            fills_slot=True,
        )
        return Begun(partial(json_after, reply, training.CreateModelResult(model.id)))

    async def _load(self, model: TrainedModel, request: Request, body: training.LoadWeightsRequest) -> Begun:
        path = parse_to_train(body.path, optimizer=body.optimizer)
        folder, _ = await self.checkpoints.open(path, self.base)
        place = self.snapshots.place(model.id, request.seq_id)
        manifest = await asyncio.to_thread(files.link, path, folder, place)
        check_rank(path, manifest.adapter, self.limits.max_rank)
        before = model.adapter if request.seq_id else None
        adapter = of_loaded(manifest.adapter, body, before)
        # The checkpoint may be deleted or overwritten later: its links are the snapshot to start from. It
        # counts only once this request has a result (checkpoints/snapshots.py).
        await self.snapshots.record(model.id, request.seq_id, place, adapter, optimizer=body.optimizer)
        model.become(adapter)

        def load() -> Move:
            return _load_state(model.slot, place, adapter, optimizer=body.optimizer)

        reply, written_out = self._put_behind_versions(model, load, LOAD_STATE, fills_slot=True)

        async def outcome() -> Outcome:
            try:
                check_loaded(await reply)
            except NotLoaded as error:
                model.stay(before, error)
                raise
            if (problem := await written_out.problem()) is not None:
                return Failed(f"{NOT_WRITTEN_OUT}: {problem}", "server", executed=True)
            if request.seq_id:
                await self.samplers.set_adapter(model.id, adapter)
            return json_result(training.LoadWeightsResult(body.path, model.id))

        return Begun(outcome, next_waits=True)

    async def _custom_in_turn(
        self,
        model: TrainedModel,
        request: Request,
        sent: ForwardBackwardRequest | None,
        size: int,
        held: ExitStack,
    ) -> Begun:
        """Run a custom loss without blocking others: only such requests share its turn and room."""
        held.close()
        self.turns.release()
        try:
            held.callback(self.loss_room.give_back, await self.loss_room.take(size))
            if sent is None:
                body = await self.custom_losses.body(request)
                sent = await compute(len(body), decode_forward_backward, body)
                del body
            return await self._custom(model, request, sent, None, self.loss_runs.limits)
        finally:
            await self.turns.acquire()

    async def _custom(
        self,
        model: TrainedModel,
        request: Request,
        sent: ForwardBackwardRequest,
        layout: str | None,
        limits: LossLimits | None,
    ) -> Begun:
        """Send the steps one after the other; after the last one the model's next request may begin.

        A replayed request has no ``limits``: it was within them the first time, and must not fail now.
        """
        is_again = limits is None
        loss_id = custom_loss.loss_id(sent)
        stored = await self.custom_losses.open(loss_id, model.session_id)
        if stored.refusal is not None and not is_again:
            raise InvalidRequest(stored.refusal)
        seen = await see(self.images, model, sent)
        shapes = with_room(self.shapes.as_recorded(layout), seen, self.pool)
        pack = partial(self._pack, model, shapes=shapes, seen=seen)
        run = partial(self.loss_runs.run, model)
        try:
            packed, outputs, differentiated = await custom_loss.differentiate(
                model, sent, stored, pack, limits, run
            )
        except LossGivenUp as error:
            self.custom_losses.give_up(loss_id, str(error))
            raise
        except ForeignCodeFailed as error:
            if is_again:
                raise InvalidRequest(str(error)) from None
            return Begun(partial(at_once, Failed(str(error), "server")))
        if not sent.forward_only:
            packed = await compute(SMALL_BYTES, custom_loss.backward, sent, differentiated, pack)
            model.request_id = request.id
            outputs = model.put_chunks(packed.chunks)
        return Begun(partial(outcome_of_loss, packed, outputs, shapes.layout, differentiated))

    def _size(self, request: ForwardBackwardRequest) -> int:
        """Return how many bytes packing processes; a request that reads files counts as large."""
        if self.routing is not None or request.loss_fn == "stable_reinforce":
            return SMALL_BYTES
        return sum(array.nbytes for datum in request.data for array in datum.loss_inputs.values())

    def _pack(
        self,
        model: TrainedModel,
        request: ForwardBackwardRequest,
        shapes: TrainingShapes,
        is_again: bool = False,
        seen: SeenImages | None = None,
    ) -> PackedRequest:
        request = without_image_targets(with_ones(request))
        loss, data = check_forward_backward(request, self.limits), request.data
        if loss.name == "stable_reinforce":
            data = self.stability.resolved(model.note_holders, data, is_again=is_again)
        experts: list[np.ndarray | None] = []
        if self.routing is not None:
            for datum in data:
                experts.append(self.routing.replayed(model.note_holders, datum.spans, len(datum.tokens)))
        packed = pack(data, loss, request.forward_only, shapes, experts, seen)
        check_room(self.pool, packed)
        return packed

    def _optim_step(self, model: TrainedModel, step: OptimizerStep) -> Begun:
        reply = model.put_later(lambda: [step.command(model.slot)], lambda: [step.program])
        return Begun(partial(outcome_of_step, step.learning_rate, reply))

    def _put_behind_versions(
        self,
        model: TrainedModel,
        command: Callable[[], Move],
        program: ProgramShape,
        *,
        fills_slot: bool = False,
    ) -> tuple[asyncio.Future[Reply], WriteOut]:
        """Put a command behind those that write versions to disk which are only on the device."""
        out = WriteOut(self.versions, model.id)
        reply = model.put_later(
            lambda: [*out.commands(), command()],
            lambda: [program, *out.programs()],
            fills_slot=fills_slot,
        )
        return reply, out


def _load_state(slot: int, path: Path, adapter: AdapterSpec, *, optimizer: bool) -> Move:
    source, target = StateFolder(str(path)), TrainSlot(slot)
    return Move(source=source, target=target, adapter=adapter, with_optimizer=optimizer)
