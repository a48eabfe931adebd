"""Which command is sent next, and what becomes of its reply. Synchronous: it never waits."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from spmd_tx.coordinator.batching import MicroBatch
from spmd_tx.coordinator.dispatch import Dispatch, VersionKey
from spmd_tx.coordinator.fair_shares import FairShares
from spmd_tx.coordinator.request_queue import Outcome
from spmd_tx.coordinator.request_times import Stage
from spmd_tx.coordinator.samples import SampleJob
from spmd_tx.coordinator.schemas import SampleRequest
from spmd_tx.coordinator.trained_model import ChunkStep, CommandStep, Step, TrainedModel
from spmd_tx.errors import MeshError, WorkerLost
from spmd_tx.protocol import (
    AnyCommand,
    Decode,
    Forward,
    ForwardBackward,
    LoadSampler,
    PageOut,
    Reply,
    Written,
)

MOST_IN_FLIGHT = 3  # commands sent and not yet answered; enough to keep the device busy
MOST_MICRO_BATCHES = 2  # of them: one runs, the next is there, and a new sample waits for no more than these

TRAINING, SAMPLING = "training", "sampling"
SHARES = {TRAINING: 0.5, SAMPLING: 0.5}  # of the device, when both wait

# In tokens of training. A decode step reads all weights, however few its rows.
DECODE_STEP_COST = 64
COMMAND_COST = 256  # of a command without rows

Outcomes = list[tuple[str, Outcome]]


class Workers(Protocol):
    """All worker processes, as one."""

    busy: str | None  # what they do instead of running commands: "compiling decode 4x16"
    on_written: Callable[
        [Written], None
    ]  # called when the files of a Snapshot are complete, or never will be

    def send(self, command: AnyCommand) -> asyncio.Future[Reply]:
        """Send to all; replies come in the order of sending. A lost worker is an error of every reply."""
        ...


class Sampling(Protocol):
    """What is used of the sample batch."""

    def admit(self, request_id: str, body: SampleRequest, version: VersionKey) -> None: ...

    def resume(self, job: SampleJob) -> None: ...

    def unanswered(self) -> dict[str, SampleJob]: ...

    def cancel(self, request_id: str) -> None: ...

    def waiting(self) -> bool: ...

    def next_dispatch(self) -> Dispatch | None: ...

    def status(self, request_id: str) -> str | None: ...


@dataclass(frozen=True)
class _Sent:
    reply: asyncio.Future[Reply]
    absorb: Callable[[Reply], Outcomes]
    side: str
    requests: frozenset[str]  # whose command it is
    steps: tuple[Step, ...] = ()

    @property
    def is_micro_batch(self) -> bool:
        return any(isinstance(step, ChunkStep) for step in self.steps)


class Dispatcher:
    """Keeps a few commands in flight, shared fairly between training and sampling, and among sessions.

    As long as there are suspects, requests whose commands may have ended a generation, one command runs at
    a time, and a suspect's runs without company, so that it is known which one ends the next generation.
    """

    def __init__(
        self,
        workers: Workers,
        sampling: Sampling,
        data_shards: int,
        on_reply: Callable[[], None],
        note: Callable[[Stage, Iterable[str]], None],
        suspects: set[str] | None = None,
    ) -> None:
        self.suspects = suspects or set()
        self._workers = workers
        self._sampling = sampling
        self._data_shards = data_shards
        self._on_reply = on_reply
        self._note = note
        self._sent: deque[_Sent] = deque()
        self._sides = FairShares(SHARES)
        self._sessions = FairShares()
        self._turns = 0
        self._last_turn: dict[str, int] = {}  # by model

    @property
    def last_reply(self) -> asyncio.Future[Reply] | None:
        """When it is there, everything sent so far has been carried out; None: it has been."""
        return self._sent[-1].reply if self._sent else None

    @property
    def in_flight(self) -> set[str]:
        """The requests whose commands are sent and not answered."""
        return set().union(*(sent.requests for sent in self._sent))

    @property
    def blamed(self) -> set[str]:
        """The requests whose command may be why the workers are lost."""
        return set().union(*(sent.requests for sent in self._sent if _is_blamed(sent.reply)))

    def lose(self, error: MeshError) -> None:
        """There will be no more replies."""
        while self._sent:
            for step in self._sent.popleft().steps:
                step.lose(error)

    def absorb(self) -> Outcomes:
        """Take in the replies that are there. Raises MeshError when there will be no more."""
        outcomes: Outcomes = []
        while self._sent and self._sent[0].reply.done():
            reply = self._sent[0].reply.result()  # of a lost one, the requests must still be known
            sent = self._sent.popleft()
            self._note("replied", sent.requests)
            outcomes += sent.absorb(reply)
        return outcomes

    def dispatch(self, models: list[TrainedModel]) -> None:
        """Send what may be sent now."""
        most = 1 if self.suspects else MOST_IN_FLIGHT
        while len(self._sent) < most and self._send_next([each for each in models if each.unsent]):
            pass

    def _send_next(self, models: list[TrainedModel]) -> bool:
        sides = [TRAINING] if models else []
        if self._sampling.waiting():
            sides.append(SAMPLING)
        for side in self._sides.ranking(sides):
            cost = self._send_training(models) if side == TRAINING else self._send_sampling()
            if cost is not None:
                self._sides.charge({side: cost})
                return True
            if any(sent.side == side for sent in self._sent):
                return False  # it goes on as soon as there is a reply: its turn is not given away
        return False

    def _send_training(self, models: list[TrainedModel]) -> float | None:
        """Send the next step of the model whose turn it is, with chunks of others where there is room."""
        order = self._in_order(models)
        step = order[0].unsent[0]
        if isinstance(step, CommandStep):
            self._charge({order[0]: COMMAND_COST})
            self._send_step(order[0])
            return COMMAND_COST
        if sum(sent.is_micro_batch for sent in self._sent) >= MOST_MICRO_BATCHES:
            return None
        batch = MicroBatch(step.chunk, self._data_shards)
        company = [order[0]]
        for model in order[1:]:
            head = model.unsent[0]
            if isinstance(head, ChunkStep) and self._may_meet(step, head) and batch.join(head.chunk):
                company.append(model)
        self._charge({model: chunk.tokens for model, chunk in zip(company, batch.chunks, strict=True)})
        steps = [model.take() for model in company]
        make = Forward if step.chunk.forward_only else ForwardBackward
        command = make(rows=batch.rows(), loss=batch.loss())
        parts = [step for step in steps if isinstance(step, ChunkStep)]
        self._send(TRAINING, command, partial(_absorb_batch, batch, parts), parts)
        return command.rows.tokens.size

    def _send_step(self, model: TrainedModel) -> None:
        step = model.take()
        assert isinstance(step, CommandStep)
        *before, command = step.make()
        for other in before:
            self._send(TRAINING, other, _nothing)
        self._send(TRAINING, command, partial(_absorb_step, step), [step])

    def _may_meet(self, *steps: ChunkStep) -> bool:
        return not self.suspects.intersection(step.request_id for step in steps)

    def _send_sampling(self) -> float | None:
        """Send the next command of the sample batch, after those that it takes to prepare it."""
        cost = None
        while (dispatch := self._sampling.next_dispatch()) is not None:
            self._send(SAMPLING, dispatch.command, dispatch.absorb, requests=dispatch.requests)
            command, cost = dispatch.command, (cost or 0) + dispatch.tokens
            if isinstance(command, Decode):
                return max(cost, command.steps * DECODE_STEP_COST)
            if not isinstance(command, PageOut | LoadSampler):
                break
        return cost

    def _send(
        self,
        side: str,
        command: AnyCommand,
        absorb: Callable[[Reply], Outcomes],
        steps: Sequence[Step] = (),
        requests: frozenset[str] = frozenset(),
    ) -> None:
        reply = self._workers.send(command)
        reply.add_done_callback(lambda _: self._on_reply())
        requests |= {step.request_id for step in steps}
        self._note("sent", requests)
        self._sent.append(_Sent(reply, absorb, side, requests, tuple(steps)))

    def _in_order(self, models: list[TrainedModel]) -> list[TrainedModel]:
        """By what their sessions are owed; the models of a session take turns."""
        sessions = list(dict.fromkeys(model.session_id for model in models))
        place = {session_id: place for place, session_id in enumerate(self._sessions.ranking(sessions))}
        return sorted(models, key=lambda model: (place[model.session_id], self._last_turn.get(model.id, 0)))

    def _charge(self, costs: dict[TrainedModel, int]) -> None:
        by_session: dict[str, float] = {}
        self._turns += 1
        for model, cost in costs.items():
            self._last_turn[model.id] = self._turns
            by_session[model.session_id] = by_session.get(model.session_id, 0.0) + cost
        self._sessions.charge(by_session)


def _absorb_batch(batch: MicroBatch, steps: list[ChunkStep], reply: Reply) -> Outcomes:
    outputs = batch.cut(reply.arrays["logprobs"], reply.arrays["losses"])
    for step, output in zip(steps, outputs, strict=True):
        step.output.set_result(output)
    return []


def _absorb_step(step: CommandStep, reply: Reply) -> Outcomes:
    step.reply.set_result(reply)
    return []


def _is_blamed(reply: asyncio.Future[Reply]) -> bool:
    error = reply.exception() if reply.done() else None
    return isinstance(error, WorkerLost) and error.by_command


def _nothing(_: Reply) -> Outcomes:
    return []
