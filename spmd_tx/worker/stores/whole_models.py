"""Whole models in their places, where all weights are trained. Bank slots have copies of all of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from jax import Array

from spmd_tx.errors import ForeignWeights, StartError
from spmd_tx.models.base_weights import Weights
from spmd_tx.models.checkpoint.files import Files
from spmd_tx.models.checkpoint.huggingface import load
from spmd_tx.models.checkpoint.tensors import check
from spmd_tx.protocol.commands import AdapterSpec, Move, Prefill
from spmd_tx.protocol.places import BankSlot, Idle, Slot, StateFolder, TrainSlot, WeightsFolder
from spmd_tx.sharding.transfer import to_devices
from spmd_tx.sharding.weight import Weight, abstract, shardings
from spmd_tx.worker.programs.call import Call
from spmd_tx.worker.programs.whole_models import ModelPrograms
from spmd_tx.worker.state import WorkerState, zeros
from spmd_tx.worker.steps.full import FullState
from spmd_tx.worker.storage.checkpoints import OnEnd, SlotState, check_shapes, fresh_state, restore_state
from spmd_tx.worker.storage.folder_writer import HostCopy
from spmd_tx.worker.storage.full_weights import write_model
from spmd_tx.worker.stores.store import Sampling, Store, adapter_of


class ModelStore(Store[ModelPrograms]):
    """Moves whole models. A copy in a bank slot is what is trained of the base model.

    All rows of a Prefill or Decode use the same copy.
    """

    def __init__(
        self, programs: ModelPrograms, state: WorkerState, run: Callable[[Call], Any], on_written: OnEnd
    ) -> None:
        super().__init__(programs, state, run, on_written)
        self._declared, self._mesh = programs.declared, programs.mesh
        self._base_model = Path(programs.setup.model_dir)
        self._copy: Weights[Weight] = programs.declared.base.trained
        self._copies: dict[int, Weights[Array]] = {0: state.base.trained}  # by bank slot

    def for_programs(self, command: Sampling) -> Sampling:
        """Let the next programs use the copy of these rows, which is all that they know."""
        if isinstance(command, Prefill):
            rows = command.rows
            self._draw_from(rows.slots[rows.segments.any(axis=1)])
            rows = msgspec.structs.replace(rows, slots=np.zeros_like(rows.slots))
            return msgspec.structs.replace(command, rows=rows)
        used = command.slots[(command.source >= 0) | (command.remaining > 0)]
        chunk = command.chunk
        if chunk is not None:
            used = np.concatenate([used, chunk.slots[(chunk.positions >= 0).any(axis=1)]])
            chunk = msgspec.structs.replace(chunk, slots=np.zeros_like(chunk.slots))
        self._draw_from(used)
        return msgspec.structs.replace(command, slots=np.zeros_like(command.slots), chunk=chunk)

    def _draw_from(self, slots: np.ndarray) -> None:
        used = np.unique(slots)
        assert used.size <= 1, f"rows of one command use the copies {used}"
        if used.size:
            base = self._state.base
            self._state.base = self._copies[int(used[0])].replace(images=base.images, mtp=base.mtp)

    def _check(self, folder: StateFolder | WeightsFolder) -> None:
        path = Path(folder.path)
        if isinstance(folder, StateFolder) and not _is_model(path):
            check_shapes(path, self._like())
            return
        try:
            check(Files(path), jax.tree.leaves(self._copy), self._programs.model.unread)
        except StartError as problem:
            raise ForeignWeights(f"{path} is of another base model: {problem}") from problem

    def _empty(self, slot: Slot) -> None:
        """Two of a kind would not fit."""
        if isinstance(slot, TrainSlot):
            self._state.train = None
        else:
            self._copies.pop(slot.slot, None)

    def _read(self, move: Move) -> Any:
        train = self._state.train
        match move.source, move.target:
            case TrainSlot(), StateFolder():
                return SlotState(train.w, train.mu, train.nu, train.step)
            case TrainSlot(), BankSlot():
                return self._run(self._programs.publish(self._state))
            case TrainSlot(), WeightsFolder():
                return train.w
            case TrainSlot(), Idle():
                self._state.train = None
                return train
            case BankSlot(slot=slot), WeightsFolder():
                return self._copies[slot]
            case BankSlot(slot=slot), Idle():
                return self._copies.pop(slot)
            case _:
                raise AssertionError(f"whole models have no way from {move.source} to {move.target}")

    def _load(self, move: Move) -> Any:
        declared, like = self._declared.train, self._like()
        match move.source:
            case WeightsFolder(path=path):
                return self._weights(Path(path), self._copy)
            case StateFolder(path=path) if not _is_model(Path(path)):
                saved = restore_state(Path(path), like, move.with_optimizer)
            case StateFolder(path=path):
                saved = fresh_state(self._weights(Path(path), declared.w), like)
            case _:
                saved = fresh_state(self._weights(self._base_model, declared.w), like)
        return self._trained(saved, adapter_of(move))

    def _like(self) -> SlotState[jax.ShapeDtypeStruct]:
        declared = self._declared.train
        return abstract(self._mesh, SlotState(declared.w, declared.mu, declared.nu, declared.step))

    def _trained(self, saved: Any, adapter: AdapterSpec) -> FullState:
        """Return the state of a training slot: with the groups that are trained, and no gradient."""
        declared = self._declared.train
        flags = np.array([adapter.train_attn, adapter.train_mlp, adapter.train_unembed], np.float32)
        groups = to_devices(flags, shardings(self._mesh, declared.groups))
        grad_sum = zeros(self._mesh, declared.grad_sum)
        return FullState(saved.w, grad_sum, saved.mu, saved.nu, saved.step, groups)

    def _write(self, move: Move, content: Any) -> None:
        if isinstance(move.target, BankSlot):
            self._copies[move.target.slot] = content
        else:
            self._state.train = content

    def _weights(self, path: Path, declared: Weights[Weight]) -> Weights[Array]:
        return load(path, declared, self._mesh, lambda _: None, self._programs.model.unread)

    def _export(self, path: Path, content: Any, adapter: AdapterSpec) -> None:
        """Bring one whole array after the other to the host."""
        leaves, is_writer = jax.tree.leaves(content), jax.process_index() == 0
        is_donated = self._state.train is not None and content is self._state.train.w
        size, copies = sum(leaf.nbytes for leaf in leaves), list[HostCopy]()
        if is_writer:
            self._writer.make_room(size)
        for number, leaf in enumerate(leaves):
            whole = leaf if jax.process_count() == 1 else self._run(self._programs.whole(number, leaf))
            if is_writer:
                copies.append(HostCopy(whole, is_donated=is_donated))
            if whole is not leaf:
                jax.block_until_ready(whole)  # the devices have room for one
        if is_writer:
            whole_copy = jax.tree.unflatten(jax.tree.structure(content), copies)
            self._writer.begin(path, whole_copy, size, adapter)

    def _write_folder(self, path: Path, copies: Any, adapter: AdapterSpec) -> None:
        write_model(path, copies, self._copy, self._programs.model, self._base_model)


def _is_model(path: Path) -> bool:
    """Say whether a folder is a Hugging Face checkpoint."""
    return (path / "config.json").exists()
