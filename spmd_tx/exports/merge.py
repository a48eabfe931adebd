"""Adds an adapter to the base model's tensors: W + scale · B A (Hu et al. 2021, section 4.1). No JAX.

Works on rows of one matrix at a time, so that memory does not grow with the model.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from spmd_tx.exports.adapter import AdapterFolder, FactorPair
from spmd_tx.models.adapter_formats.files import AdapterModule
from spmd_tx.models.declared.maps import Map, TensorSource, linear
from spmd_tx.models.declared.model import HEAD, Model


@dataclass(frozen=True)
class FactorsDelta:
    """Holds what one module adds to a matrix of a stored tensor."""

    module: AdapterModule
    expert: int | None  # among the module's; None: it has one matrix
    source: TensorSource


@dataclass(frozen=True)
class Change:
    """Holds the deltas of one stored tensor."""

    deltas: dict[int, list[FactorsDelta]]  # by the matrix within the tensor: the expert's number, or 0
    copied_from: str | None = None  # the tensor that it starts from, if the base model has none of its own


class Merge:
    """Says which tensors an adapter changes, and computes what it adds to them."""

    def __init__(self, adapter: AdapterFolder, model: Model) -> None:
        self._adapter = adapter
        self.changes: dict[str, Change] = _changes(adapter, model)
        # Of the last delta, as rows follow each other.
        self._factors: tuple[FactorsDelta, FactorPair] | None = None

    def add(self, name: str, matrix: int, first: int, rows: np.ndarray) -> None:
        """Add to some rows, as they are stored, of one matrix of a tensor; float32, in place.

        ``first`` is the number of the first row.
        """
        for delta in self.changes[name].deltas.get(matrix, ()):
            factors = self._read(delta)
            scale = np.float32(self._adapter.scale(delta.module))
            if delta.source.transposed:
                chosen, outputs = _rows_in(delta.source, len(factors.b), first, len(rows))
                rows[chosen] += scale * (factors.b[outputs] @ factors.a)
            else:
                inputs = slice(first, first + len(rows))
                columns = slice(None) if delta.source.rows is None else slice(*delta.source.rows)
                rows[:, columns] += scale * (factors.b @ factors.a[:, inputs]).T

    def _read(self, delta: FactorsDelta) -> FactorPair:
        if self._factors is None or self._factors[0] is not delta:
            self._factors = delta, self._adapter.factors(delta.module, delta.expert)
        return self._factors[1]


def _rows_in(source: TensorSource, outputs: int, first: int, count: int) -> tuple[slice, slice]:
    """Return which of ``count`` stored rows a map has, and which of its outputs they are."""
    start, _, step = source.rows or (0, outputs, 1)
    begin = max(0, -(-(first - start) // step))
    end = min(outputs, max(begin, -(-(first + count - start) // step)))
    at = start + begin * step - first
    return slice(at, at + (end - begin) * step, step), slice(begin, end)


def _changes(adapter: AdapterFolder, model: Model) -> dict[str, Change]:
    deltas_by_name: dict[str, dict[int, list[FactorsDelta]]] = defaultdict(lambda: defaultdict(list))
    for module in adapter.present:
        declared = model.adapted[module.map]
        for expert, matrix, name in _matrices(module, declared.map, declared.numbers, model):
            deltas_by_name[name][matrix].append(FactorsDelta(module, expert, _source(declared.map, model)))
    tied = {model.head.name: model.embed.name} if model.is_tied else {}
    return {name: Change(dict(deltas), tied.get(name)) for name, deltas in deltas_by_name.items()}


def _source(declared: Map, model: Model) -> TensorSource:
    if declared.name == HEAD:
        return linear(model.head.module)
    return declared.source


def _matrices(
    module: AdapterModule, declared: Map, numbers: range | None, model: Model
) -> Iterator[tuple[int | None, int, str]]:
    """Yield (expert among the module's, matrix within the tensor, name of the tensor)."""
    source = _source(declared, model)
    if numbers is None:
        yield None, 0, source.name
        return
    layer, *experts = module.at
    is_shared = len(module.a) == 3
    for expert in range(declared.experts) if is_shared else (experts or [0]):
        name = source.name.format(layer=numbers[layer], expert=expert)
        yield expert if is_shared else None, expert if source.stacked else 0, name
