"""Adapters of tiny models of every family, whose gradients and greedy texts transformers has computed.

transformers_adapters.npz holds for each case, with ``<family>`` or ``<family>/per-expert`` as its name:

- ``<name>/logprobs`` float32 [LENGTH - 1]: of the tokens of the family's text behind the first one,
- ``<name>/<factor>`` float32 [n + 1]: numbers of the gradient of a factor at ``places``, and its norm,
- ``<name>/greedy`` int32 [GREEDY] and ``<name>/greedy_logprobs``: what follows the text.

The loss is the sum of the log-probabilities times ``loss_weights``, negated.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from spmd_tx.models.adapters.lora import Adapters, Lora, shapes
from spmd_tx.models.declared.maps import Map
from spmd_tx.models.declared.model import FACTORS, ExpertLora, Model
from spmd_tx.models.families.registry import declare
from spmd_tx.protocol.commands import AdapterSpec
from tests.golden.families import CONFIGS, LENGTH, tokens

ADAPTERS = Path(__file__).parent / "transformers_adapters.npz"
ADAPTER = AdapterSpec(rank=4, alpha=6.0)
GREEDY = 24  # tokens
KEPT = 40  # numbers of a factor's gradient
PER_EXPERT = ("qwen3_moe", "gpt_oss")
HEAD_TENSOR = "lm_head.weight"

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One family and one layout of its experts' adapters."""

    family: str
    layout: ExpertLora = "shared-outer"

    @property
    def name(self) -> str:
        return self.family if self.layout == "shared-outer" else f"{self.family}/{self.layout}"

    @property
    def model(self) -> Model:
        return replace(declare(CONFIGS[self.family]), expert_lora=self.layout)

    @property
    def loss_weights(self) -> np.ndarray:
        """The weights of the tokens behind the first one."""
        return _random(self.family, LENGTH - 1, "loss").normal(size=LENGTH - 1).astype(np.float32)


CASES = [Case(family) for family in CONFIGS] + [Case(family, "per-expert") for family in PER_EXPERT]


def _random(*key: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def adapter(case: Case) -> Adapters[np.ndarray]:
    """Return factors [..., R, width] of the adapter's rank, none of them zero."""
    model = case.model

    def pair(name: str) -> Lora[np.ndarray]:
        its = shapes(model, name, ADAPTER.rank)
        of_a, of_b = (
            0.2 * _random(case.name, name, n).standard_normal(s) for n, s in enumerate((its.a, its.b))
        )
        return Lora(of_a.astype(np.float32), of_b.astype(np.float32))

    *layers, head = model.adapted
    return Adapters({name: pair(name) for name in layers}, pair(head))


def named(adapters: Adapters[np.ndarray]) -> dict[str, Lora[np.ndarray]]:
    return {**adapters.layers, "head": adapters.head}


def places(name: str, size: int) -> np.ndarray:
    """Return where in the flat gradient of a factor the kept numbers are."""
    return _random(name, size).choice(size, min(KEPT, size), replace=False)


def summary(name: str, gradient: np.ndarray) -> np.ndarray:
    """Return what the file holds of a factor's gradient."""
    flat = gradient.astype(np.float64).reshape(-1)
    return np.append(flat[places(name, flat.size)], np.linalg.norm(flat)).astype(np.float32)


def scale_of(model: Model, name: str) -> float:
    return ADAPTER.alpha / model.adapted[name].rank(ADAPTER.rank)


def matrices(model: Model, name: str, tensors: Tensors) -> Iterator[tuple[Any, Any, np.ndarray]]:
    """Yield views [in, out] of an adapted map in a checkpoint, with the indices of its A and B."""
    adapted = model.adapted[name]
    if adapted.numbers is None:
        yield (), (), tensors[HEAD_TENSOR].T
        return
    of_a, of_b = (len(adapted.lead(factor)) for factor in FACTORS)
    for place, layer in enumerate(adapted.numbers):
        for expert in range(adapted.map.experts or 1):
            index = (place, expert)
            yield index[:of_a], index[:of_b], _matrix(adapted.map, tensors, layer, expert)


def _matrix(declared: Map, tensors: Tensors, layer: int, expert: int) -> np.ndarray:
    source = declared.source
    stored = tensors[source.name.format(layer=layer, expert=expert)]
    stored = stored[expert] if source.stacked else stored
    stored = stored.T if source.transposed else stored
    return stored if source.rows is None else stored[:, slice(*source.rows)]


def merge(case: Case, tensors: Tensors) -> None:
    """Add the adapter to the tensors of a checkpoint, in place: W + scale · Aᵀ B."""
    model = case.model
    for name, pair in named(adapter(case)).items():
        for of_a, of_b, matrix in matrices(model, name, tensors):
            matrix += scale_of(model, name) * pair.a[of_a].T @ pair.b[of_b]


def gradients(case: Case, tensors: Tensors) -> dict[str, np.ndarray]:
    """Return the gradients of all factors, of those of the merged tensors, by the chain rule."""
    model, found = case.model, {}
    for name, pair in named(adapter(case)).items():
        of = {factor: np.zeros(getattr(pair, factor).shape, np.float64) for factor in "ab"}
        for of_a, of_b, matrix in matrices(model, name, tensors):
            of["a"][of_a] += scale_of(model, name) * pair.b[of_b] @ matrix.T
            of["b"][of_b] += scale_of(model, name) * pair.a[of_a] @ matrix
        found |= {f"{name}.{factor}": gradient for factor, gradient in of.items()}
    return found


def text(case: Case) -> np.ndarray:
    return tokens(case.family)
