"""Reads all numbers of saved states and weights, in a form that can be compared."""

from hashlib import blake2b
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from safetensors.numpy import load_file

from spmd_tx.coordinator.wire.checkpoint_paths import parse


def state_digests(checkpoints: Path, path: str) -> dict[str, str]:
    """Return digests by array: weights, both moments, and the number of steps."""
    arrays = _state(checkpoints, path)
    return {name: _digest(array) for name, array in arrays.items()}


def steps_of(checkpoints: Path, path: str) -> int:
    """Return how many updates the optimizer state has seen."""
    [step] = [array for name, array in _state(checkpoints, path).items() if name.endswith("step']")]
    return int(step)


def weight_digests(checkpoints: Path, path: str) -> dict[str, str]:
    """Return digests of the PEFT folder of a saved sampler."""
    folder = parse(path).folder(checkpoints)
    return {name: _digest(array) for name, array in load_file(folder / "adapter_model.safetensors").items()}


def _state(checkpoints: Path, path: str) -> dict[str, np.ndarray]:
    folder = parse(path).folder(checkpoints)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree: Any = checkpointer.metadata(folder).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        restored = checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    leaves = jax.tree_util.tree_leaves_with_path(restored)
    return {jax.tree_util.keystr(where): np.asarray(leaf) for where, leaf in leaves}


def _digest(array: np.ndarray) -> str:
    text = f"{array.dtype} {array.shape} ".encode()
    return blake2b(text + np.ascontiguousarray(array).tobytes(), digest_size=16).hexdigest()
