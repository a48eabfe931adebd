"""Adapters in their places: stacked in slots on the devices, single ones elsewhere."""

from pathlib import Path
from typing import Any

import jax
from jax import Array

from spmd_tx.models.adapter_formats import peft
from spmd_tx.models.adapters.lora import Adapters
from spmd_tx.protocol.commands import AdapterSpec, Move
from spmd_tx.protocol.places import BankSlot, Fresh, Slot, StateFolder, TrainSlot, WeightsFolder
from spmd_tx.sharding.transfer import to_devices
from spmd_tx.sharding.weight import shardings
from spmd_tx.worker.programs.adapters import AdapterPrograms
from spmd_tx.worker.steps.adapters import one_adapter
from spmd_tx.worker.storage.checkpoints import fresh_state, restore_state
from spmd_tx.worker.stores.store import Store, adapter_of


class AdapterStore(Store[AdapterPrograms]):
    """Moves adapters. A program reads or fills one entry of the stacks."""

    def _check(self, folder: StateFolder | WeightsFolder) -> None:
        """Leave it to ``_load``, before which nothing is changed."""

    def _empty(self, slot: Slot) -> None:
        pass

    def _read(self, move: Move) -> Any:
        assert isinstance(move.source, Slot)
        return self._run(self._programs.read(self._state, move.source, move.pair.carries))

    def _load(self, move: Move) -> Any:
        match move.source:
            case WeightsFolder(path=path):
                return self._weights(Path(path), move)
            case StateFolder(path=path):
                like = self._programs.like(TrainSlot, "state")
                if peft.is_folder(Path(path)):
                    return fresh_state(self._weights(Path(path), move), like)
                return restore_state(Path(path), like, move.with_optimizer)
            case _:
                return None  # one program makes and fills

    def _write(self, move: Move, content: Any) -> None:
        programs, state, form = self._programs, self._state, move.pair.carries
        match move.source, move.target:
            case Fresh(seed=seed), TrainSlot(slot=slot):
                state.train = self._run(programs.create(state, slot, seed, adapter_of(move)))
            case _, TrainSlot() as slot:
                state.train = self._run(programs.write(state, slot, form, content, move.adapter))
            case _, BankSlot() as slot:
                state.bank = self._run(programs.write(state, slot, form, content, move.adapter))
            case _:
                raise AssertionError(f"{move.target} is not on the devices")

    def _weights(self, path: Path, move: Move) -> Adapters[Array]:
        """Read an adapter in fp32 onto the devices, as one training slot is split."""
        programs = self._programs
        host = peft.read(path, adapter_of(move), programs.model, programs.setup.max_rank)
        one = one_adapter(programs.declared.train.w)
        return jax.tree.map(to_devices, host, shardings(programs.mesh, one))

    def _export(self, path: Path, content: Any, adapter: AdapterSpec) -> None:
        if jax.process_count() > 1:
            content = self._run(self._programs.gather(content))
        if jax.process_index() == 0:
            self._writer.submit(path, content, adapter)

    def _write_folder(self, path: Path, copies: Any, adapter: AdapterSpec) -> None:
        peft.write(path, copies, adapter, self._programs.model, self._programs.setup.model_name)
