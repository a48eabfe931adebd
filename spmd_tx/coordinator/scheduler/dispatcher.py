"""Decides which command is sent next, and passes on what its reply brings. Synchronous: it never waits."""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from spmd_tx.coordinator.mesh.compilation import SettledProgram
from spmd_tx.coordinator.mesh.hub import is_blamed
from spmd_tx.coordinator.requests.queue import RequestQueue
from spmd_tx.coordinator.requests.records import Outcome
from spmd_tx.coordinator.runtime import metrics
from spmd_tx.coordinator.runtime.containment import let_pass
from spmd_tx.coordinator.runtime.fair_shares import FairShares
from spmd_tx.coordinator.scheduler.command_metrics import count_images, count_micro_batch, measure_move
from spmd_tx.coordinator.scheduler.command_seconds import CommandSeconds, work_of
from spmd_tx.coordinator.scheduler.generation import GenerationParts
from spmd_tx.coordinator.scheduler.planned_for import PlannedFor, apart, head_of, together
from spmd_tx.coordinator.scheduler.request_table import Danger, RequestTable
from spmd_tx.coordinator.scheduler.tenant_shares import Charge, Payer, TenantShares
from spmd_tx.coordinator.training.micro_batch import MicroBatch
from spmd_tx.coordinator.training.model import ChunkStep, CommandStep, ModelStep, TrainedModel
from spmd_tx.coordinator.training.programs import StepPrograms
from spmd_tx.errors import MeshError
from spmd_tx.protocol.commands import AnyCommand, EncodeImages, Forward, ForwardBackward, Move
from spmd_tx.protocol.reports import Reply

MOST_IN_FLIGHT = 3  # commands sent and not yet answered; enough to keep the device busy
MOST_MICRO_BATCHES = 2  # of them: one runs, the next is there, and a new sample waits for no more than these

TRAINING, SAMPLING = "training", "sampling"
SHARES = {TRAINING: 0.5, SAMPLING: 0.5}  # of the device, when both wait

# A side that is owed more than this, and whose last commands are under way, may have more to send when one
# of them is answered; until then the other side sends nothing.
PATIENCE = 0.1  # seconds
FIRST_GUESS = 0.01  # seconds that a command takes of which there was none yet

# Tokens that a command without rows, and moving an adapter, take from a model's turn in its slot.
COMMAND_COST = 256

Outcomes = list[tuple[str, Outcome]]


class _Sent(NamedTuple):
    reply: asyncio.Future[Reply]
    absorb: Callable[[Reply], Outcomes]
    side: str
    requests: frozenset[str]  # whose command it is
    steps: tuple[ModelStep, ...] = ()

    @property
    def is_micro_batch(self) -> bool:
        return any(isinstance(step, ChunkStep) for step in self.steps)


@dataclass(eq=False)
class Dispatcher:
    """Keeps a few commands in flight, shared fairly between training and sampling, and among tenants.

    While there are suspects, requests whose commands may have ended a generation, one command runs at a time,
    and a suspect's runs alone, so that it is known which one ends the next generation.

    A step is sent only if its programs are ready on all workers. Until then its model is passed over but
    keeps its share, and the programs are compiled beside the commands of others.

    Shares are of time. A command is charged for when it is sent, by the time that others like it took, and
    its reply corrects this.
    """

    parts: GenerationParts
    table: RequestTable
    log: RequestQueue  # hears how far requests are, and for how many seconds devices worked on them
    on_reply: Callable[[], None]
    clock: Callable[[], float] = time.monotonic
    seconds: CommandSeconds = field(default_factory=CommandSeconds)
    _sent: deque[_Sent] = field(default_factory=deque[_Sent])
    _planned_for: Callable[[], PlannedFor] = PlannedFor
    _sides: FairShares = field(default_factory=lambda: FairShares(SHARES))
    _sessions: TenantShares = field(default_factory=TenantShares)
    _turns: int = 0
    _last_turn: dict[str, int] = field(default_factory=dict)  # by model
    _replied_at: float = 0.0

    def __post_init__(self) -> None:
        parts, training = self.parts, self.parts.training
        self._workers, self._sampling, self._compilation = parts.workers, parts.sampling, parts.compilation
        self._slots, self._shapes, self._pool = training.slots, training.shapes, training.pool
        self._programs = StepPrograms(parts.compilation, training.slots, self.log.note)

    @property
    def last_reply(self) -> asyncio.Future[Reply] | None:
        """A future that is done when everything sent so far has been carried out; None: it has been."""
        return self._sent[-1].reply if self._sent else None

    @property
    def in_flight(self) -> set[str]:
        """The requests whose commands are sent and not answered, or whose programs are being compiled."""
        return self._compilation.waiting.union(*(sent.requests for sent in self._sent))

    @property
    def blamed(self) -> set[str]:
        """The requests whose command, or whose program, may have caused the loss of the workers."""
        return self._compilation.blamed.union(
            *(sent.requests for sent in self._sent if is_blamed(sent.reply))
        )

    @property
    def planned_for(self) -> PlannedFor:
        """For whom ``absorb`` or ``dispatch`` worked when it raised."""
        return self._planned_for()

    def restart_sampling(self, without: Iterable[str]) -> Outcomes:
        """Plan samples anew, but for some; what has been sent is carried out for nobody."""
        self._sent = deque(
            sent._replace(absorb=_nothing) if sent.side == SAMPLING and sent.requests else sent
            for sent in self._sent
        )
        lonely = self.table.in_danger_of(Danger.PLANNING)
        ended = self._sampling.start_over({state.request.id for state in lonely})
        for request_id in without:
            self._sampling.cancel(request_id)
        return ended

    def lose(self, error: MeshError) -> None:
        """Fail what is in flight: there will be no more replies."""
        self._programs.await_for(())
        while self._sent:
            for step in self._sent.popleft().steps:
                step.lose(error)

    def absorb(self) -> Iterator[tuple[str, Outcome]]:
        """Take in the replies that have come. Raises MeshError when there will be no more."""
        self._planned_for = PlannedFor
        while self._sent and self._sent[0].reply.done():
            reply = self._sent[0].reply.result()  # of one that is lost, the requests must still be known
            yield from self._absorb(self._sent.popleft(), reply)
        for settled in self._programs.settle():
            yield from self._take_compiled(settled)

    def _absorb(self, sent: _Sent, reply: Reply) -> Outcomes:
        self.log.note("replied", sent.requests)
        if sent.side == SAMPLING:
            self._planned_for = lambda: PlannedFor(samples=sent.requests)
        try:
            outcomes = sent.absorb(reply)
        except BaseException as error:
            let_pass(error)
            if not sent.steps:
                raise
            for step in sent.steps:  # their requests have been executed, and know what has happened
                step.lose(error)
            return []
        self._planned_for = PlannedFor
        return outcomes

    def dispatch(self, models: list[TrainedModel]) -> None:
        """Send what may be sent now."""
        self._planned_for = PlannedFor
        for command in self._slots.take_dropped():
            self._send(Payer(TRAINING), command, _nothing)
        for command in self._sampling.take_dropped():
            self._send(Payer(SAMPLING), command, _nothing)
        self._look(models)
        has_suspects = self.table.has_suspects
        most = 1 if has_suspects else MOST_IN_FLIGHT
        is_held_up = has_suspects and self._compilation.is_out  # what may be as bad as a command
        while not is_held_up and len(self._sent) < most:
            if not self._send_next([each for each in models if each.unsent]):
                break
            self._look(models)
        if not (has_suspects and self._sent):
            self._order(models)

    def _look(self, models: list[TrainedModel]) -> None:
        self._programs.give_up_failed(models)
        for model in models:
            self._planned_for = partial(PlannedFor, (model,))
            self._programs.look(model)
        self._planned_for = PlannedFor

    def _order(self, models: list[TrainedModel]) -> None:
        self._planned_for = lambda: PlannedFor(samples=frozenset(self._sampling.planned_for))
        samples = self._sampling.program_requests()
        waiting = [model for model in models if model.missing]
        chosen = together(waiting, [each.request_id for each in samples], self.table)
        self._planned_for = lambda: chosen
        samples = [each for each in samples if each.request_id in chosen.samples]
        ahead = [model for model in models if not head_of(model, self.table).is_lonely]
        only_awaited = self.table.has_suspects
        self._programs.order(chosen.models, ahead, samples, self.on_reply, only_awaited=only_awaited)
        self._planned_for = PlannedFor

    def _take_compiled(self, settled: SettledProgram) -> Outcomes:
        if settled.costs:
            self._sessions.charge(settled.costs)
        return [] if settled.error is None else self._sampling.not_compiled(settled.program, settled.error)

    def _send_next(self, models: list[TrainedModel]) -> bool:
        if not models and not self._sampling.may_send:
            return False
        waiting = {TRAINING} if any(not model.missing for model in models) else set[str]()
        if self._sampling.waiting():
            waiting.add(SAMPLING)
        in_flight = {sent.side for sent in self._sent}
        ranking = self._sides.ranking([side for side in SHARES if side in waiting | in_flight])
        for side in ranking:
            if side in waiting and (
                self._send_training(models) if side == TRAINING else self._send_sampling()
            ):
                if ranking[0] not in in_flight | {side}:  # it can do nothing, so this takes nothing from it
                    self._sides.ranking([side])
                return True
            if side in in_flight and (side in waiting or self._sides.owed(side) > PATIENCE):
                return False  # it goes on as soon as there is a reply: its turn is not given away
        return False

    def _send_training(self, models: list[TrainedModel]) -> bool:
        """Send the next step of a model, if any could be sent. The lonely ones take turns with all others."""
        groups = apart(models, self.table)
        groups.sort(key=lambda group: min(self._last_turn.get(model.id, 0) for model in group))
        return any(self._send_one_of(group) for group in groups)

    def _send_one_of(self, models: list[TrainedModel]) -> bool:
        """Send the next step of the model whose turn it is, with chunks of others; return whether any.

        A model without a slot, which gets none before others have had their turns, is passed over, and so
        is one that waits for a program.
        """
        self._planned_for = partial(PlannedFor, tuple(models))
        ranked = self._in_order(models)  # all of them: who is passed over is owed his share
        able = [each for each in ranked if not each.missing]
        is_idle = not any(sent.side == TRAINING for sent in self._sent)
        order = self._slots.seatable(models, able, at_once=is_idle)
        if not order:
            return False  # there is a reply to wait for
        step = order[0].unsent[0]
        heads = [order[0]]
        self._planned_for = lambda: PlannedFor(tuple(heads))
        if isinstance(step, CommandStep):
            cost = COMMAND_COST + (self._seat(order[0]) if step.needs_slot else 0)
            self._send_step(self._payer({order[0]: cost}), order[0])
            return True
        if sum(sent.is_micro_batch for sent in self._sent) >= MOST_MICRO_BATCHES:
            return False
        swapping = {order[0]: self._seat(order[0])}
        batch = MicroBatch(step.chunk.in_slot(order[0].slot), self._shapes)
        for model in () if batch.is_full else order[1:]:
            head = model.unsent[0]
            if not isinstance(head, ChunkStep) or not self._may_meet(order[0], model):
                continue
            heads.append(model)
            has_room = batch.fits(head.chunk) and self._pool.fits([*batch.images, *head.chunk.seen])
            if not has_room or self._programs.missing(model, swapping):
                heads.pop()
            elif model.has_slot or self._slots.has_place(beside=swapping):
                swapping[model] = self._seat(model, beside=swapping)
                batch.join(head.chunk.in_slot(model.slot))
            else:
                heads.pop()
        trained = zip(swapping.items(), batch.chunks, strict=True)
        payer = self._payer({model: cost + chunk.tokens for (model, cost), chunk in trained})
        make = Forward if step.chunk.forward_only else ForwardBackward
        self._send_images(payer, batch, [model.unsent[0].request_id for model in swapping])
        command = make(rows=batch.rows(), loss=batch.loss(), block=batch.rows_of_shard)
        count_micro_batch(batch, command)
        heads_of = [model.unsent[0] for model in swapping]
        parts = [step for step in heads_of if isinstance(step, ChunkStep)]
        self._send(payer, command, partial(_absorb_batch, batch, parts), parts)
        for model in swapping:
            model.take()
        return True

    def _send_images(self, payer: Payer, batch: MicroBatch, requests: Iterable[str]) -> None:
        """Send what encodes the images of a micro-batch that the devices do not have."""
        placed = self._pool.place(batch.images)
        batch.see(placed.ids)
        for command in placed.commands:
            self._send(payer, command, _nothing, requests=frozenset(requests))

    def _seat(self, model: TrainedModel, beside: Collection[TrainedModel] = ()) -> int:
        """Give a model a slot, and return the tokens that this takes from its turn."""
        commands = self._slots.seat(model, beside)
        for command in commands:
            self._send(Payer(TRAINING, {model.session_id: 1.0}), command, _nothing)
        return COMMAND_COST * len(commands)

    def _send_step(self, payer: Payer, model: TrainedModel) -> None:
        step = model.unsent[0]
        assert isinstance(step, CommandStep)
        *before, command = step.make()
        for other in before:
            self._send(payer, other, _nothing)
        self._send(payer, command, partial(_absorb_step, step), [step])
        model.take()

    def _may_meet(self, *models: TrainedModel) -> bool:
        heads = [self.table.get(model.unsent[0].request_id) for model in models]
        return not any(head is not None and head.is_suspect for head in heads)

    def _send_sampling(self) -> bool:
        """Send the next command of samples, behind those that prepare it; return whether there was one."""
        is_sent = False
        self._planned_for = lambda: PlannedFor(samples=frozenset(self._sampling.planned_for))
        while (dispatch := self._sampling.next_dispatch()) is not None:
            self._send(Payer(SAMPLING), dispatch.command, dispatch.absorb, requests=dispatch.requests)
            is_sent = True
            if not isinstance(dispatch.command, Move | EncodeImages):
                break
        return is_sent

    def _send(
        self,
        payer: Payer,
        command: AnyCommand,
        absorb: Callable[[Reply], Outcomes],
        steps: Sequence[ModelStep] = (),
        requests: frozenset[str] = frozenset(),
    ) -> None:
        requests |= {step.request_id for step in steps}
        work = work_of(command)
        charged = self.seconds.estimate(work) or FIRST_GUESS
        reply = self._workers.send(command, requests)
        count_images(command)
        self._sent.append(_Sent(reply, absorb, payer.side, requests, tuple(steps)))
        self._sides.charge({payer.side: charged})
        if payer.sessions:
            self._sessions.charge({session: part * charged for session, part in payer.sessions.items()})
        charge = Charge(payer, work, charged, self.clock(), requests)
        move = command if isinstance(command, Move) else None
        reply.add_done_callback(partial(self._replied, charge, move))
        self.log.note("sent", requests)

    def _replied(self, charge: Charge, move: Move | None, reply: asyncio.Future[Reply]) -> None:
        self.on_reply()
        began_at, self._replied_at = max(charge.sent_at, self._replied_at), self.clock()
        if reply.cancelled() or reply.exception() is not None:
            return
        seconds, payer = self._replied_at - began_at, charge.payer
        self.seconds.learn(charge.work, seconds)
        metrics.DEVICE_SECONDS.labels(payer.side, metrics.group()).inc(seconds)
        self.log.worked(charge.requests, seconds)
        missing = seconds - charge.seconds
        self._sides.correct({payer.side: missing})
        if payer.sessions:
            self._sessions.correct({session: part * missing for session, part in payer.sessions.items()})
        if move is not None:
            measure_move(move, reply.result(), seconds)

    def _in_order(self, models: list[TrainedModel]) -> list[TrainedModel]:
        """Sort models by what their tenants and sessions are owed; the models of a session take turns."""
        sessions = {model.session_id: model.tenant for model in models}
        place = {session_id: place for place, session_id in enumerate(self._sessions.ranking(sessions))}
        return sorted(models, key=lambda model: (place[model.session_id], self._last_turn.get(model.id, 0)))

    def _payer(self, tokens: dict[TrainedModel, int]) -> Payer:
        """Note that models have their turn; their sessions pay by the tokens of each."""
        parts, total = defaultdict[str, float](float), sum(tokens.values())
        self._turns += 1
        for model, tokens_of_model in tokens.items():
            if model.has_slot:
                self._slots.used(model, tokens_of_model)
            self._last_turn[model.id] = self._turns
            parts[model.session_id] += tokens_of_model / total
        return Payer(TRAINING, parts)


def _absorb_batch(batch: MicroBatch, steps: list[ChunkStep], reply: Reply) -> Outcomes:
    outputs = batch.cut(reply.arrays["logprobs"], reply.arrays["losses"])
    for step, output in zip(steps, outputs, strict=True):
        step.output.set_result(output)
    return []


def _absorb_step(step: CommandStep, reply: Reply) -> Outcomes:
    step.reply.set_result(reply)
    return []


def _nothing(_: Reply) -> Outcomes:
    return []
