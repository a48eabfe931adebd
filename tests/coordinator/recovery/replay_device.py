"""A device without numbers: the state of a slot is a hash of all that was done to it, in that order.

Gradients are sums, so that neither the packing nor the company of rows shows; everything else does. What is
done twice, left out or done in another order gives another hash, and other log-probabilities and tokens.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np

from spmd_tx.protocol.commands import AnyCommand, Drop, Forward, ForwardBackward, Move, OptimStep, PackedRows
from spmd_tx.protocol.places import BankSlot, Fresh, Idle, StateFolder, TrainSlot, WeightsFolder
from tests.coordinator.sampling.fake_device import FakeDevice

STATE, ADAPTER, CONFIG = "state.json", "adapter_model.safetensors", "adapter_config.json"
GRADIENTS = 1 << 61  # they are summed modulo this


@dataclass(frozen=True)
class SlotState:
    """What one adapter is."""

    weights: str
    gradient: int = 0
    steps: int = 0


def created(seed: int) -> SlotState:
    return SlotState(_hash("created", seed))


def stepped(state: SlotState, learning_rate: float) -> SlotState:
    weights = _hash(state.weights, state.gradient, learning_rate, state.steps)
    return SlotState(weights, 0, state.steps + 1)


def scored(state: SlotState, token: int, target: int) -> float:
    """The log-probability of a token; of these two tokens only, for simplicity."""
    return -int(_hash(state.weights, token, target)[:4], 16) / 4096


def with_gradient(state: SlotState, tokens: list[int], targets: list[int]) -> SlotState:
    """Of one datum."""
    return replace(
        state, gradient=(state.gradient + int(_hash(state.weights, tokens, targets)[:15], 16)) % GRADIENTS
    )


class ReplayDevice(FakeDevice):
    """Executes all commands; what it writes to disk outlives it."""

    def __init__(self, pages: int, page_size: int) -> None:
        super().__init__(shards=1, pages=pages, page_size=page_size)
        self.slots: dict[int, SlotState] = {}
        self.swapped: dict[str, SlotState] = {}  # by model
        # What is written aside: paths, and what writes to them
        self.unwritten: list[tuple[str, partial[None]]] = []

    def execute(self, command: AnyCommand) -> tuple[dict, dict]:
        match command:
            case ForwardBackward(rows=rows) | Forward(rows=rows):
                return self._score(rows, isinstance(command, ForwardBackward)), {}
            case OptimStep(slot=slot, learning_rate=learning_rate):
                norm = float(self.slots[slot].gradient % 4096)
                self.slots[slot] = stepped(self.slots[slot], learning_rate)
                return {}, {"grad_norm": norm, "applied": 1.0}
            case Drop(places=places):
                for place in places:
                    kept = self.swapped if place.name in self.swapped else self.paged
                    del kept[place.name]
            case _:
                return super().execute(command)
        return {}, {}

    def _move(self, move: Move) -> dict:
        replies = super()._move(move)
        match move.source, move.target:
            case Fresh(seed=seed), TrainSlot(slot=slot):
                self.slots[slot] = created(seed)
            case TrainSlot(slot=slot), StateFolder(path=path) if move.in_background:
                self.unwritten.append((path, partial(write_state, state=self.slots[slot])))
            case TrainSlot(slot=slot), StateFolder(path=path):
                write_state(Path(path), self.slots[slot])
            case StateFolder(path=path), TrainSlot(slot=slot):
                self.slots[slot] = read_state(Path(path), move.with_optimizer)
            case TrainSlot(slot=slot), Idle(name=name):
                self.swapped[name] = self.slots.pop(slot)
            case Idle(name=name), TrainSlot(slot=slot):
                self.slots[slot] = self.swapped.pop(name)
            case TrainSlot(slot=slot), BankSlot(slot=bank):
                self.bank[bank] = self.slots[slot].weights
                if move.also is not None:
                    self._write_peft(move.also.path, self.slots[slot].weights)
            case TrainSlot(slot=slot), WeightsFolder(path=path):
                self._write_peft(path, self.slots[slot].weights)
            case BankSlot(slot=bank), WeightsFolder(path=path):
                self._write_peft(path, self.bank[bank])
            case WeightsFolder(path=path), BankSlot(slot=bank):
                self.bank[bank] = (Path(path) / ADAPTER).read_text()
        return replies

    def _write_peft(self, path: str, weights: str) -> None:
        self.unwritten.append((path, partial(_write_peft, weights=weights)))

    def _score(self, rows: PackedRows, with_gradients: bool) -> dict[str, np.ndarray]:
        logprobs = np.zeros(rows.tokens.shape, np.float32)
        before = dict(self.slots)
        for row, slot, place in _segments(rows):
            state = before[slot]
            tokens, targets = rows.tokens[row, place].tolist(), rows.targets[row, place].tolist()
            logprobs[row, place] = [scored(state, *pair) for pair in zip(tokens, targets, strict=True)]
            if with_gradients:
                change = with_gradient(replace(state, gradient=0), tokens, targets).gradient
                total = (self.slots[slot].gradient + change) % GRADIENTS
                self.slots[slot] = replace(self.slots[slot], gradient=total)
        return {"logprobs": logprobs, "losses": -logprobs}


def write_state(path: Path, state: SlotState) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / STATE).write_text(json.dumps([state.weights, state.steps]))


def read_state(path: Path, optimizer: bool) -> SlotState:
    weights, steps = json.loads((path / STATE).read_text())
    return SlotState(weights, 0, steps if optimizer else 0)


def _write_peft(path: Path, weights: str) -> None:
    """Complete, or not there at all, as the real one."""
    partial = path.with_name(f".{path.name}.writing")
    partial.mkdir(parents=True, exist_ok=True)
    (partial / ADAPTER).write_text(weights)
    (partial / CONFIG).write_text(json.dumps({"r": 4, "lora_alpha": 32.0, "target_modules": ["lm_head"]}))
    if not path.exists():
        partial.rename(path)


def _segments(rows: PackedRows) -> Iterator[tuple[int, int, np.ndarray]]:
    """(row, slot, places) of every datum."""
    for row, slot in enumerate(rows.slots.tolist()):
        for number in range(1, int(rows.segments[row].max()) + 1):
            yield row, slot, np.flatnonzero(rows.segments[row] == number)


def _hash(*parts: object) -> str:
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()
