"""Moves what is trained between the places of protocol/places.py, whatever its kind."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax

from spmd_tx.protocol.commands import AdapterSpec, Decode, Move, Prefill
from spmd_tx.protocol.places import BankSlot, Fresh, Idle, Slot, StateFolder, TrainSlot, WeightsFolder
from spmd_tx.worker.idle_adapters import IdleAdapters, place_of
from spmd_tx.worker.memory.host import idle_budget
from spmd_tx.worker.programs.adapters import AdapterPrograms
from spmd_tx.worker.programs.call import Call
from spmd_tx.worker.programs.whole_models import ModelPrograms
from spmd_tx.worker.state import WorkerState
from spmd_tx.worker.storage.checkpoints import OnEnd, save_state, write_in_background
from spmd_tx.worker.storage.folder_writer import FolderWriter

Programs = TypeVar("Programs", AdapterPrograms, ModelPrograms)
Sampling = TypeVar("Sampling", Prefill, Decode)


class Store(ABC, Generic[Programs]):
    """Moves one kind of content: adapters, or whole models."""

    def __init__(
        self, programs: Programs, state: WorkerState, run: Callable[[Call], Any], on_written: OnEnd
    ) -> None:
        """``run`` runs a program; ``on_written`` is told of folders, by other threads."""
        self._programs, self._state, self._run, self._on_written = programs, state, run, on_written
        setup = programs.setup
        directory = place_of(Path(setup.idle_adapters), setup.generation, jax.process_index())
        budget = idle_budget(setup.host_processes or setup.num_processes)
        self._idle = IdleAdapters(directory, budget)
        self._writer = FolderWriter(self._write_folder, budget // 4, on_written)

    def move(self, move: Move) -> dict[str, float]:
        """Carry out a move; return the metrics of its reply, as its pair of places has them.

        Raises ForeignWeights, before anything is changed, when a folder is of another base model.
        """
        metrics: dict[str, float] = {}
        if isinstance(move.source, StateFolder | WeightsFolder):
            self._check(move.source)
        if isinstance(move.target, Slot):
            self._empty(move.target)
        match move.source:
            case TrainSlot() | BankSlot():
                content = self._read(move)
            case Idle(name=name):
                content, is_from_disk = self._idle.take(name)
                metrics = {"from_disk": is_from_disk}
            case StateFolder() | WeightsFolder() | Fresh():
                content = self._load(move)
        match move.target:
            case TrainSlot() | BankSlot():
                self._write(move, content)
                if move.also is not None:
                    self._export(Path(move.also.path), content, adapter_of(move))
            case Idle(name=name):
                self._idle.put(name, content)
                metrics = {"host_bytes": self._idle.host_bytes, "disk_bytes": self._idle.disk_bytes}
            case WeightsFolder(path=path):
                self._export(Path(path), content, adapter_of(move))
            case StateFolder(path=path):
                rank = adapter_of(move).rank or None
                if move.in_background:
                    write_in_background(Path(path), content, rank, self._on_written)
                else:
                    save_state(Path(path), content, rank)
            case Fresh():
                raise AssertionError("nothing goes back")
        return metrics

    def drop(self, places: Iterable[Idle]) -> None:
        """Delete what is idle."""
        self._idle.drop(place.name for place in places)

    def for_programs(self, command: Sampling) -> Sampling:
        """Return the command as programs take it, and let them use the bank slots of its rows."""
        return command

    @abstractmethod
    def _check(self, folder: StateFolder | WeightsFolder) -> None:
        """Raise ForeignWeights if a folder is of another base model, unless ``_load`` does."""

    @abstractmethod
    def _empty(self, slot: Slot) -> None:
        """Free memory before a slot is filled."""

    @abstractmethod
    def _read(self, move: Move) -> Any:
        """Return what goes from a slot, in the form of its pair of places."""

    @abstractmethod
    def _load(self, move: Move) -> Any:
        """Return what goes into a slot from a folder, or what is new."""

    @abstractmethod
    def _write(self, move: Move, content: Any) -> None:
        """Fill a slot."""

    @abstractmethod
    def _export(self, path: Path, content: Any, adapter: AdapterSpec) -> None:
        """Begin to write weights on process 0, which needs a whole copy of what several processes hold."""

    @abstractmethod
    def _write_folder(self, path: Path, copies: Any, adapter: AdapterSpec) -> None:
        """Write weights that are in host memory."""


def adapter_of(move: Move) -> AdapterSpec:
    """Return the adapter of a move that has to name it."""
    assert move.adapter is not None, f"{move.name} needs to know the adapter"
    return move.adapter
