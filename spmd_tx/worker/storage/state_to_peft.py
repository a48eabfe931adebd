"""Reads the weights of a training checkpoint (Orbax) and writes them as a PEFT folder, outside a worker."""

from pathlib import Path

import jax
import numpy as np

from spmd_tx.models.adapter_formats import peft
from spmd_tx.models.adapters.lora import Lora, for_maps, shapes
from spmd_tx.models.declared.model import Model
from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.worker.storage.checkpoints import reading_for_export, restore_weights

CPU = "cpu"


def write_peft(state: Path, place: Path, adapter: AdapterSpec, model: Model, base_model: str) -> None:
    """Write the folder ``place``. Raises StartError when ``state`` is no such checkpoint of the model."""
    jax.config.update("jax_platforms", CPU)  # accelerators may belong to a server
    sharding = jax.sharding.SingleDeviceSharding(jax.devices(CPU)[0])

    def factors(name: str) -> Lora[jax.ShapeDtypeStruct]:
        pair = shapes(model, name, adapter.rank)
        return Lora(*(jax.ShapeDtypeStruct(each, np.float32, sharding=sharding) for each in (pair.a, pair.b)))

    with reading_for_export(state):
        weights = restore_weights(state, for_maps(model, factors))
    peft.write(place, jax.tree.map(np.asarray, weights), adapter, model, base_model)
