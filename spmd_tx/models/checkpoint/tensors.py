"""Says which tensors of a Hugging Face checkpoint declared weights are, and checks that all fit together."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from spmd_tx.errors import StartError
from spmd_tx.models.checkpoint.copies import check_copies
from spmd_tx.models.checkpoint.files import ENCODED, Files
from spmd_tx.models.declared.encoding import DeclaredTensor
from spmd_tx.models.declared.unread import Unread
from spmd_tx.sharding.weight import Weight

SliceBounds = tuple[tuple[int, int], ...]  # from, to along each dimension
FEW = 3  # names in a message
SAME_MODEL = "weights and config.json must be of the same model"


def stacked(weight: Weight) -> tuple[int, ...]:
    """Return the leading dimensions along which the weight stacks tensors of the checkpoint."""
    return weight.shape[: weight.hf_name.count("{")]


def tensor_name(weight: Weight, index: tuple[int, ...]) -> str:
    """Return the checkpoint's name of one tensor of the weight."""
    counted = [name for name in ("layer", "expert") if f"{{{name}}}" in weight.hf_name]
    numbers = dict(zip(counted, index, strict=True))
    if weight.numbers is not None and index:
        numbers["layer"] = weight.numbers[index[0]]
    return weight.hf_name.format(**numbers)


def tensor_names(weight: Weight) -> Iterable[str]:
    """Yield the names of all tensors of the weight."""
    return (tensor_name(weight, index) for index in np.ndindex(stacked(weight)))


def stored_slices(weight: Weight, bounds: SliceBounds) -> tuple[slice, ...]:
    """Return where a part of a weight's array is in its tensor. ``bounds`` are without stacked dimensions.

    Those of an encoded tensor count the numbers that it decodes to.
    """
    slices = [slice(*bound) for bound in bounds]
    if weight.piece:
        step, inputs = _inputs_of_row(weight), slices[-2]
        slices[-2] = slice(inputs.start * step, inputs.stop * step)
    if weight.rows is not None:
        first, _, step = weight.rows
        start, stop = bounds[-1]
        slices[-1] = slice(first + start * step, first + (stop - 1) * step + 1, step)
    return _stored(tuple(slices)) if weight.transposed else tuple(slices)


def check(tensors: Files, weights: list[Weight], unread: Unread | None) -> None:
    """Raise StartError unless the checkpoint has the weights in their declared shapes, and nothing else.

    ``unread`` says which tensors need not be declared; None: any.
    """
    ends: dict[str, DeclaredTensor] = {}  # each with its shape up to the last row that is read
    for weight in weights:
        for name in tensor_names(weight):
            if weight.piece == "scales" and weight.kept == weight.encoding:
                _check_scales(tensors, weight, name)
            for part in parts(weight, name):
                seen = ends.get(part.name, part)
                if len(seen.shape) == len(part.shape):
                    part = replace(part, shape=tuple(map(max, seen.shape, part.shape)))
                ends[part.name] = part
    for name, part in ends.items():
        stored = tensors.tensor(name)
        if stored.shape != part.shape:
            raise StartError(
                f"{tensors.file_of(name)}: {name} has the shape {list(stored.shape)}, but by config.json "
                f"it must be {list(part.shape)}; {SAME_MODEL}"
            )
        encoded = ENCODED.get(part.dtype)
        if stored.dtype != encoded if encoded else stored.dtype in ENCODED.values():
            raise StartError(
                f"{tensors.file_of(name)}: {name} is stored as {stored.dtype}, but by config.json it must be "
                f"{encoded or 'of 16 bits or more'}; {SAME_MODEL}"
            )
    if unread is not None:
        check_copies(tensors, unread)
        _check_others([name for name in tensors.names if name not in ends], unread, tensors.model_dir)


def parts(weight: Weight, name: str) -> tuple[DeclaredTensor, ...]:
    """Return the tensors that hold what the weight calls ``name``: one, or as many as its encoding takes."""
    shape = _shape_to_end(weight)
    return (
        (DeclaredTensor(name, shape, ""),) if weight.encoding is None else weight.encoding.parts(name, shape)
    )


def _check_scales(tensors: Files, weight: Weight, name: str) -> None:
    """Refuse scales that would be rounded."""
    scales = parts(weight, name)[1].name
    stored, needed = tensors.tensor(scales).dtype, np.dtype(weight.dtype)
    if stored != needed:
        raise StartError(
            f"{tensors.file_of(scales)}: {scales} is stored as {stored}, but matrices stay encoded only with "
            f"scales of {needed}; set --expert-weights to unpacked and --base-dtype to auto"
        )


def _check_others(names: list[str], unread: Unread, model_dir: Path) -> None:
    unknown = unread.unknown(names)
    if unknown:
        some = ", ".join(map(repr, unknown[:FEW])) + (", ..." if len(unknown) > FEW else "")
        raise StartError(
            f"{model_dir} has {len(unknown)} tensors for which config.json has no use ({some}), so the model "
            f"would not compute what it was trained to; {SAME_MODEL}"
        )


def _shape_to_end(weight: Weight) -> tuple[int, ...]:
    """Return the shape of the weight's tensor, as far as the weight reads its rows."""
    shape = weight.shape[len(stacked(weight)) :]
    if weight.piece:
        *lead, rows, columns = shape
        shape = (*lead, rows * _inputs_of_row(weight), columns)
    if weight.rows is not None:
        shape = (*shape[:-1], weight.rows[1])
    return _stored(shape) if weight.transposed else shape


def _inputs_of_row(weight: Weight) -> int:
    """Return how many inputs a row of a piece of encoded matrices is for."""
    return weight.kept.of_byte if weight.piece == "numbers" else weight.kept.group


def _stored(of_each_dimension: tuple[Any, ...]) -> tuple[Any, ...]:
    """Swap the last two dimensions, as in a weight that is stored transposed."""
    *lead, last_but_one, last = of_each_dimension
    return (*lead, last, last_but_one)
