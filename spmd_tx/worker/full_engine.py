"""The engine of a server that trains all weights of the model: those of samplers are copies of it."""

from pathlib import Path
from typing import Any

import jax
import msgspec
import numpy as np
from jax import Array

from spmd_tx.models.base_weights import Weights
from spmd_tx.models.checkpoint.huggingface import load
from spmd_tx.protocol import commands
from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.sharding.transfer import to_devices
from spmd_tx.sharding.weight import Weight, abstract, shardings
from spmd_tx.worker.engine import Engine, Result, of_model, of_version
from spmd_tx.worker.programs.full_calls import FullCalls, FullMenu
from spmd_tx.worker.state import zeros
from spmd_tx.worker.steps.full import FullState
from spmd_tx.worker.storage.checkpoints import (
    SlotState,
    fresh_state,
    restore_state,
    save_state,
    write_in_background,
)
from spmd_tx.worker.storage.folder_writer import HostCopy
from spmd_tx.worker.storage.full_weights import write_model


class FullEngine(Engine):
    """Carries out commands where the one training slot holds all weights of the model.

    A bank slot holds a copy of them, as the base model's are declared. All rows of a Prefill or Decode use
    the same one.
    """

    CALLS, MENU = FullCalls, FullMenu
    _calls: FullCalls

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._copies: dict[int, Weights[Array]] = {0: self.state.base}  # by bank slot

    def create_adapter(self, command: commands.CreateAdapter) -> Result:
        """Begin with the weights of the base model."""
        self._read(Path(self.setup.model_dir), command.adapter)
        return {}, {}

    def save_state(self, command: commands.SaveState) -> Result:
        save_state(Path(command.path), self._saved, None)
        return {}, {}

    def snapshot(self, command: commands.Snapshot) -> Result:
        write_in_background(Path(command.path), self._saved, None, self.on_written)
        return {}, {}

    def load_state(self, command: commands.LoadState) -> Result:
        path = Path(command.path)
        if (path / "config.json").exists():
            self._read(path, command.adapter)
        else:
            self.state.train = None  # two states would not fit
            self._fill(restore_state(path, self._like, command.optimizer), command.adapter)
        return {}, {}

    def swap_out(self, command: commands.SwapOut) -> Result:
        train, self.state.train = self.state.train, None
        return self._put(of_model(command.model), train)

    def swap_in(self, command: commands.SwapIn) -> Result:
        self.state.train = None
        self.state.train, is_from_disk = self._take(of_model(command.model), self.declared.train)
        return {}, {"from_disk": is_from_disk}

    def drop_swapped(self, command: commands.DropSwapped) -> Result:
        for model in command.models:
            self._idle.drop(_names(of_model(model), self.declared.train))
        return {}, {}

    def save_sampler(self, command: commands.SaveSampler) -> Result:
        if command.bank >= 0:
            self._copies.pop(command.bank, None)
            self._copies[command.bank] = self._run(self._calls.publish(self.state))
        if command.path is not None:
            content = self._copies[command.bank] if command.bank >= 0 else self.state.train.w
            self._write(content, command.path, command.adapter, is_donated=command.bank < 0)
        return {}, {}

    def write_sampler(self, command: commands.WriteSampler) -> Result:
        self._write(self._copies[command.bank], command.path, command.adapter)
        return {}, {}

    def load_sampler(self, command: commands.LoadSampler) -> Result:
        self._copies.pop(command.bank, None)
        self._copies[command.bank] = self._load(Path(command.path), self.declared.base)
        return {}, {}

    def page_out(self, command: commands.PageOut) -> Result:
        return self._put(of_version(command.version), self._copies.pop(command.bank))

    def page_in(self, command: commands.PageIn) -> Result:
        self._copies.pop(command.bank, None)
        taken = self._take(of_version(command.version), self.declared.base)
        self._copies[command.bank], is_from_disk = taken
        return {}, {"from_disk": is_from_disk}

    def drop_paged(self, command: commands.DropPaged) -> Result:
        for version in command.versions:
            self._idle.drop(_names(of_version(version), self.declared.base))
        return {}, {}

    def prefill(self, command: commands.Prefill) -> Result:
        rows = command.rows
        self._draw_from(rows.slots[rows.segments.any(axis=1)])
        rows = msgspec.structs.replace(rows, slots=np.zeros_like(rows.slots))
        return super().prefill(msgspec.structs.replace(command, rows=rows))

    def decode(self, command: commands.Decode) -> Result:
        self._draw_from(command.slots[(command.source >= 0) | (command.remaining > 0)])
        return super().decode(msgspec.structs.replace(command, slots=np.zeros_like(command.slots)))

    def _draw_from(self, slots: np.ndarray) -> None:
        """Let the next programs of sampling use the copy of these rows."""
        used = np.unique(slots)
        assert used.size <= 1, f"rows of one command use the copies {used}"
        if used.size:
            self.state.base = self._copies[int(used[0])]

    @property
    def _saved(self) -> SlotState[Array]:
        train = self.state.train
        return SlotState(train.w, train.mu, train.nu, train.step)

    @property
    def _like(self) -> SlotState[jax.ShapeDtypeStruct]:
        train = self.declared.train
        return abstract(self.mesh, SlotState(train.w, train.mu, train.nu, train.step))

    def _read(self, path: Path, adapter: AdapterSpec) -> None:
        """Train the weights of a complete model from here on."""
        self.state.train = None
        self._fill(fresh_state(self._load(path, self.declared.train.w), self._like), adapter)

    def _fill(self, saved: Any, adapter: AdapterSpec) -> None:
        flags = np.array([adapter.train_attn, adapter.train_mlp, adapter.train_unembed], np.float32)
        groups = to_devices(flags, shardings(self.mesh, self.declared.train.groups))
        grad_sum = zeros(self.mesh, self.declared.train.grad_sum)
        self.state.train = FullState(saved.w, grad_sum, saved.mu, saved.nu, saved.step, groups)

    def _load(self, path: Path, declared: Weights[Weight]) -> Weights[Array]:
        return load(path, declared, self.mesh, lambda _: None, self.model.unread)

    def _put(self, name: str, tree: Any) -> Result:
        """Move arrays off the devices."""
        for each, leaf in zip(_names(name, tree), _leaves(tree), strict=True):
            self._idle.put(each, leaf)
        return {}, {"host_bytes": self._idle.host_bytes, "disk_bytes": self._idle.disk_bytes}

    def _take(self, name: str, declared: Any) -> tuple[Any, bool]:
        """Put them back; return them, and whether any was read from disk."""
        taken = [self._idle.take(each) for each in _names(name, declared)]
        arrays = jax.tree.unflatten(jax.tree.structure(declared), [leaf for leaf, _ in taken])
        return arrays, any(is_from_disk for _, is_from_disk in taken)

    def _write(
        self, content: Weights[Array], path: str, adapter: AdapterSpec, *, is_donated: bool = False
    ) -> None:
        """Begin to write a complete model on process 0, which gets one whole array after the other."""
        leaves, is_writer = _leaves(content), jax.process_index() == 0
        size, copies = sum(leaf.nbytes for leaf in leaves), list[HostCopy]()
        if is_writer:
            self._writer.make_room(size)
        for number, leaf in enumerate(leaves):
            whole = leaf if jax.process_count() == 1 else self._run(self._calls.whole(number, leaf))
            if is_writer:
                copies.append(HostCopy(whole, is_donated=is_donated))
            if whole is not leaf:
                jax.block_until_ready(whole)  # the devices have room for one
        if is_writer:
            whole_copy = jax.tree.unflatten(jax.tree.structure(self.declared.base), copies)
            self._writer.begin(Path(path), whole_copy, size, adapter)

    def _write_folder(self, path: Path, one: Any, adapter: AdapterSpec) -> None:
        write_model(path, one, self.declared.base, self.model, Path(self.setup.model_dir))


def _leaves(tree: Any) -> list[Array]:
    return jax.tree.leaves(tree)


def _names(name: str, tree: Any) -> list[str]:
    """Return the names in idle memory of a tree's arrays."""
    return [f"{name}, array {number}" for number in range(len(_leaves(tree)))]
