"""Stand-ins for workers that train and for stored custom losses."""

import asyncio
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np

from spmd_tx.coordinator.training.custom_loss_catalog import StoredLoss
from spmd_tx.custom_loss import definition as custom_loss
from spmd_tx.custom_loss.definition import Definition, LossInput, WireGraph, WireNode
from spmd_tx.errors import InvalidRequest
from spmd_tx.protocol.commands import CustomLoss, Drop, Forward, ForwardBackward, Move, OptimStep
from spmd_tx.protocol.places import BankSlot, Fresh, Idle, StateFolder, TrainSlot, WeightsFolder
from spmd_tx.protocol.reports import CustomLossEnd, CustomLossNews, Reply, Written
from tests.support.moves import is_one_of, refusal_of


class FakeTrainer:
    """Workers that train: a slot's gradient is a sum over its tokens. Replies can be held back."""

    busy = None

    def __init__(self):
        self.on_written = self.on_custom_loss = None  # given by the bench
        self.write_error = None  # why no PEFT folder can be written
        self.holds_writes = False
        self.unwritten = []  # reports that are kept back
        self.losses = {}  # that are being run, by number
        self.holds_losses = False
        self.refused = set()  # folders that are not loaded
        self.commands = []
        self.held = []  # replies on their way, oldest first
        self.is_holding = False
        self.holds = ()  # types or names of commands whose replies are held back all the same
        self.gradients = defaultdict(float)
        self.weights = {}
        self.swapped = {}
        self.paged = {}

    def send(self, command, requests=()):
        self.commands.append(command)
        refusal = refusal_of(command, self.refused)
        arrays, metrics = ({}, {}) if refusal else self._execute(command)
        reply = Reply(
            generation=1,
            process=0,
            sequence=len(self.commands),
            arrays=arrays,
            metrics=metrics,
            refusal=refusal,
        )
        answer = asyncio.get_running_loop().create_future()
        if self.is_holding or is_one_of(command, self.holds):
            self.held.append((answer, reply))
        else:
            asyncio.get_running_loop().call_soon(answer.set_result, reply)
        return answer

    def answer(self, count=1):
        for _ in range(count):
            answer, reply = self.held.pop(0)
            answer.set_result(reply)

    def die(self, error):
        for answer, _ in self.held:
            answer.set_exception(error)
        self.held.clear()

    def sent(self, *kinds):
        return [command for command in self.commands if is_one_of(command, kinds)]

    def _begin_loss(self, command):
        """It is ``scale`` times the sum of the logprobs; it ends when the loop comes to it, or is let go."""
        self.losses[command.number] = command
        if not self.holds_losses:
            asyncio.get_running_loop().call_soon(self.end_loss, command.number)

    def end_loss(self, number, **outcome):
        command = self.losses.pop(number)
        lengths, (logprobs, scales) = command.lengths, command.values
        totals = np.add.reduceat(logprobs, np.cumsum(lengths) - lengths) * scales
        gradients = np.repeat(scales, lengths).astype(np.float32)
        arrays = {"losses": totals, "metrics": totals[:, None], "gradients": gradients}
        if (scales < 0).any():
            outcome = {"problem": "datum 0: it does not fit"}
        end = {"arrays": arrays} | outcome
        self.on_custom_loss(CustomLossEnd(generation=1, process=0, number=number, **end))

    def tell_of_loss(self, number, doing):
        self.on_custom_loss(CustomLossNews(generation=1, process=0, number=number, doing=doing))

    def _execute(self, command):
        match command:
            case ForwardBackward(rows=rows, loss=loss) | Forward(rows=rows, loss=loss):
                logprobs = -(rows.tokens + rows.targets / 8).astype(np.float32)
                with np.errstate(over="ignore"):
                    losses = -logprobs * (loss.weights + loss.advantages)
                if isinstance(command, ForwardBackward):
                    for row, slot in enumerate(rows.slots.tolist()):
                        self.gradients[slot] += float(losses[row].sum(dtype=np.float64))
                return {"logprobs": logprobs, "losses": losses}, {}
            case CustomLoss():
                self._begin_loss(command)
            case OptimStep(slot=slot, learning_rate=learning_rate):
                gradient = self.gradients.pop(slot, 0.0)
                applied = bool(np.isfinite(gradient))
                self.weights[slot] -= learning_rate * gradient if applied else 0.0
                return {}, {"grad_norm": abs(gradient), "applied": float(applied)}
            case Move():
                self._move(command)
                counts = {"host_bytes": float(len(self.swapped)), "disk_bytes": 0.0, "from_disk": 0.0}
                return {}, {name: counts[name] for name in command.pair.replies}
            case Drop(places=places):
                for place in places:
                    del (self.swapped if place.name in self.swapped else self.paged)[place.name]
        return {}, {}

    def _move(self, move):
        match move.source, move.target:
            case Fresh(seed=seed), TrainSlot(slot=slot):
                self.weights[slot] = float(seed)
            case TrainSlot(slot=slot), Idle(name=name):
                self.swapped[name] = self.weights.pop(slot), self.gradients.pop(slot, 0.0)
            case Idle(name=name), TrainSlot(slot=slot):
                self.weights[slot], self.gradients[slot] = self.swapped.pop(name)
            case TrainSlot(slot=slot), StateFolder(path=path):
                _write(path, "state", self.weights[slot])
                if move.in_background:
                    self._end_writing(path)
            case StateFolder(path=path), TrainSlot(slot=slot):
                self.weights[slot] = float((Path(path) / "state").read_text())
            case TrainSlot(slot=slot), BankSlot() if move.also is not None:
                self._write_peft(move.also.path, self.weights[slot])
            case TrainSlot(slot=slot), WeightsFolder(path=path):
                self._write_peft(path, self.weights[slot])
            case BankSlot(slot=bank), WeightsFolder(path=path):
                self._write_peft(path, bank)
            case BankSlot(slot=bank), Idle(name=name):
                self.paged[name] = bank
            case Idle(name=name), BankSlot():
                del self.paged[name]

    def _write_peft(self, path, weights):
        if self.write_error is None:
            _write(path, "adapter_model.safetensors", weights)
        self._end_writing(path, self.write_error)

    def _end_writing(self, path, error=None):
        """Report it when the loop comes to it, or keep the report back."""
        report = Written(generation=1, process=0, path=path, error=error)
        if self.holds_writes:
            self.unwritten.append(report)
        else:
            asyncio.get_running_loop().call_soon(lambda: self.on_written(report))


def _write(path, name, weights):
    Path(path).mkdir(parents=True)
    (Path(path) / name).write_text(repr(weights))


class FakeCustomLosses:
    """One loss, in all sessions; the fake trainer runs it (see there)."""

    ID = "loss-1"
    DEFINITION = Definition(
        "fake",
        [LossInput("logprobs", 1), LossInput("scale", 0)],
        WireGraph(
            [
                WireNode("placeholder", "logprobs", "logprobs"),
                WireNode("placeholder", "scale", "scale"),
                WireNode("call_function", "mul", "torch.mul", [{"ref": "logprobs"}, {"ref": "scale"}]),
                WireNode("call_method", "total", "sum", [{"ref": "mul"}]),
                WireNode(
                    "output",
                    "output",
                    "output",
                    [[{"ref": "total"}, {"dict": {"custom/total:mean": {"ref": "total"}}}]],
                ),
            ]
        ),
    )

    def __init__(self, log):
        self.given_up = {}
        self.body = log.payload

    async def open(self, loss_id, session_id):
        if loss_id != self.ID:
            raise InvalidRequest(f"custom loss {loss_id!r} does not exist in this session")
        definition = msgspec.json.encode(self.DEFINITION)
        return StoredLoss(
            custom_loss.read(self.DEFINITION), definition, session_id, self.given_up.get(loss_id)
        )

    def give_up(self, loss_id, why):
        self.given_up[loss_id] = why
