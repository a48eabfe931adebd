"""Orbax checkpoints of one training slot. All processes call these functions together.

Every process writes and reads its own shards, in one directory that all of them see.
"""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import absl.logging
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax import Array

from spmd_tx.errors import ForeignWeights, StartError
from spmd_tx.models.adapters.lora import Adapters
from spmd_tx.models.base_weights import Weights
from spmd_tx.sharding.tree_node import TreeNode

Leaf = TypeVar("Leaf")
OnEnd = Callable[[str, str | None], None]  # path, and what went wrong

WRITE_TIMEOUT_SECONDS = 300  # for the processes that write a checkpoint together to meet
# A reader has to hold a whole chunk of an array; small ones take long.
CHUNK_BYTES = 16 << 20  # of a table of rows, at most
LEAST_CHUNK_BYTES = 1 << 20

absl.logging.set_verbosity(absl.logging.WARNING)  # otherwise Orbax logs every step of a save


class SlotState(TreeNode, Generic[Leaf]):
    """Holds what is trained, in fp32: an adapter, or the weights of a whole model.

    Factors of adapters have no slot axis: [L, R, width], the head's [R, width].
    """

    w: Adapters[Leaf] | Weights[Leaf]
    mu: Adapters[Leaf] | Weights[Leaf]
    nu: Adapters[Leaf] | Weights[Leaf]
    step: Leaf  # int32


def save_state(path: Path, state: SlotState[Array], rank: int | None) -> None:
    """Write the first ``rank`` rows of every factor (the rest is padding); return when that is complete.

    None: all rows.
    """
    with _checkpointer() as checkpointer:
        checkpointer.save(path.absolute(), args=_saved(state, rank), force=True)


def write_in_background(path: Path, state: SlotState[Array], rank: int | None, on_end: OnEnd) -> None:
    """Write as save_state does, but return once ``state`` may be freed; another thread calls ``on_end``."""
    checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(), timeout_secs=WRITE_TIMEOUT_SECONDS)
    try:
        checkpointer.save(path.absolute(), args=_saved(state, rank), force=True)
    except OSError as problem:
        on_end(str(path), str(problem))
    else:
        threading.Thread(target=_wait, args=(checkpointer, path, on_end), daemon=True).start()


def _wait(checkpointer: ocp.AsyncCheckpointer, path: Path, on_end: OnEnd) -> None:
    try:
        checkpointer.wait_until_finished()
        checkpointer.close()
    except (OSError, ValueError, RuntimeError) as problem:  # a full disk; a process that did not join
        on_end(str(path), f"{type(problem).__name__}: {problem}")
    else:
        on_end(str(path), None)


def _saved(state: SlotState[Array], rank: int | None) -> ocp.args.PyTreeSave:
    rows = _as_mappings(_first_rows(state, rank))
    return ocp.args.PyTreeSave(rows, save_args=jax.tree.map(_chunks, rows))


def _as_mappings(state: SlotState[Array]) -> dict[str, Any]:
    """Return the arrays in mappings, one for each field that holds any: Orbax writes empty fields, too."""
    tree: dict[str, Any] = {}
    for place, leaf in jax.tree_util.tree_leaves_with_path(state):
        *outer, last = (jax.tree_util.keystr((key,), simple=True) for key in place)
        within = tree
        for name in outer:
            within = within.setdefault(name, {})
        within[last] = leaf
    return tree


def _chunks(array: Array) -> ocp.SaveArgs:
    """Store the layers of a stacked array apart, and some rows of a large table together."""
    if array.ndim < 2 or array.nbytes <= CHUNK_BYTES:
        return ocp.SaveArgs()
    rows, *rest = array.sharding.shard_shape(array.shape)
    row_bytes = math.prod(rest) * array.dtype.itemsize
    if array.ndim > 2:
        return ocp.SaveArgs(shard_axes=(0,) if row_bytes >= LEAST_CHUNK_BYTES else ())
    # Chunks divide the rows evenly: those of a vocabulary whose size is a prime number would be single rows.
    together = max((n for n in range(1, CHUNK_BYTES // row_bytes + 1) if rows % n == 0), default=0)
    is_divided = together * row_bytes >= LEAST_CHUNK_BYTES
    return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES if is_divided else None)


def _first_rows(state: SlotState[Array], rank: int | None) -> SlotState[Array]:
    if rank is None:
        return state
    return jax.tree.map(lambda factor: factor[..., :rank, :] if factor.ndim > 1 else factor, state)


def restore_state(
    path: Path, like: SlotState[jax.ShapeDtypeStruct], optimizer: bool = True
) -> SlotState[Array]:
    """Read a slot in the shapes and shardings of ``like``; a smaller rank is padded with zeros.

    Without ``optimizer`` only the weights are read, and moments and step are zero. Raises ForeignWeights if
    arrays have other names, or other shapes but for the rank.
    """
    return _restore(path, like) if optimizer else fresh_state(restore_weights(path, like.w), like)


def restore_weights(
    path: Path, like: Adapters[jax.ShapeDtypeStruct] | Weights[jax.ShapeDtypeStruct]
) -> Adapters[Array] | Weights[Array]:
    """Read the weights alone, as restore_state does."""
    unread = jax.tree.map(lambda _: ocp.PLACEHOLDER, like)
    return _restore(path, SlotState(like, unread, unread, ocp.PLACEHOLDER)).w


@contextmanager
def reading_for_export(path: Path) -> Iterator[None]:
    """Raise StartError for what the functions above and below raise of a damaged or foreign checkpoint."""
    try:
        yield
    except (ForeignWeights, ValueError, KeyError, OSError) as problem:
        raise StartError(
            f"{path} is not a training checkpoint of this base model, or is damaged: {problem}"
        ) from problem


def stored_arrays(path: Path) -> dict[str, Any]:
    """Describe the arrays of a checkpoint, by the fields of SlotState and their names. Raises ValueError."""
    with _checkpointer() as checkpointer:
        metadata = checkpointer.metadata(path.absolute()).item_metadata
    if metadata is None:
        raise ValueError("its arrays are not described")
    return metadata.tree


def _restore(path: Path, wanted: SlotState[Any]) -> SlotState[Array]:
    """Read by the names of arrays: fields that hold none are not there in checkpoints of earlier versions."""
    stored, leaves = stored_arrays(path), by_name(wanted)
    check_shapes(path, wanted, stored)
    item = _with_leaves(stored, lambda name: leaves.get(name, ocp.PLACEHOLDER))
    with _checkpointer() as checkpointer:
        restored = checkpointer.restore(
            path.absolute(),
            args=ocp.args.PyTreeRestore(item=item, restore_args=jax.tree.map(_how, item)),
        )
    return _with_leaves(wanted, by_name(restored).__getitem__)


def fresh_state(
    w: Adapters[Array] | Weights[Array], like: SlotState[jax.ShapeDtypeStruct]
) -> SlotState[Array]:
    """Return a slot with these weights, whose optimizer has taken no step."""
    return SlotState(w, *jax.tree.map(_zeros, (like.mu, like.nu, like.step)))


def check_shapes(path: Path, wanted: SlotState[Any], stored: dict[str, Any] | None = None) -> None:
    """Raise ForeignWeights unless a checkpoint has these arrays, in their shapes but for the rank.

    ``stored`` is what stored_arrays returns; None: it is read.
    """
    found, expected = _shapes_of(stored or stored_arrays(path)), _shapes_of(wanted)
    others = (name for name in found if name.startswith("w.") and name not in expected)
    for name in (*expected, *sorted(others)):
        shapes = found.get(name), expected.get(name)
        if isinstance(wanted.w, Adapters):
            has_same = _without_rank(shapes[0]) == _without_rank(shapes[1])
        else:
            has_same = shapes[0] == shapes[1]
        if not has_same:
            there, here = ("not there" if shape is None else str(list(shape)) for shape in shapes)
            raise ForeignWeights(f"{path} is of another base model: in it {name} is {there}, and here {here}")


def _without_rank(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return shape if shape is None or len(shape) < 2 else (*shape[:-2], *shape[-1:])


def _shapes_of(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of arrays by their names; without those that are not to be read."""
    return {name: tuple(leaf.shape) for name, leaf in by_name(tree).items() if leaf is not ocp.PLACEHOLDER}


def by_name(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by the names that Orbax gives their arrays."""
    return {_name(place): leaf for place, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _with_leaves(tree: Any, leaf_of: Callable[[str], Any]) -> Any:
    """Return a tree of this structure with other leaves, by their names."""
    return jax.tree_util.tree_map_with_path(lambda place, _: leaf_of(_name(place)), tree)


def _name(place: Any) -> str:
    return jax.tree_util.keystr(place, simple=True, separator=".")


def _checkpointer() -> ocp.Checkpointer:
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())


def _how(leaf: Any) -> ocp.RestoreArgs:
    if leaf is ocp.PLACEHOLDER:
        return ocp.RestoreArgs()
    # Not strict: a stored array of another rank is padded with zeros or cut at its end.
    return ocp.ArrayRestoreArgs(
        sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype, strict=False
    )


def _zeros(leaf: jax.ShapeDtypeStruct) -> Array:
    return jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)
