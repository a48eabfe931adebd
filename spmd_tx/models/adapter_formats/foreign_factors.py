"""Reads an adapter's file, in any form that PEFT and hosted Tinker write, as factors of this model. No JAX.

A map of experts is stored as one module for each of them, as hosted Tinker's stack of all of them, or as
PEFT's pair for a parameter of transformers; other maps have a pair of their own, or are part of PEFT's pair
for a matrix that holds several maps. Ranks and scales may differ between modules (``rank_pattern``,
``alpha_pattern``): lower ranks are padded with zeros, and B takes up what the scale differs.

Dimension key: X expert, R rank, I input width, O output width.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np

from spmd_tx.errors import InvalidRequest
from spmd_tx.models.adapter_formats.files import PREFIX, Module, Shape, modules, spelling, stored_names
from spmd_tx.models.adapter_formats.meaning import Meaning, Scales
from spmd_tx.models.adapter_formats.peft_targets import DOWN, GATE_UP, module_of, rows_of, target_of
from spmd_tx.models.config import ModelConfig
from spmd_tx.models.declared.layers import EXPERT_LORA, FACTORS, Factor
from spmd_tx.protocol.commands import AdapterSpec

DTYPES = ("F32", "BF16", "F16")
SHOWN = 3  # names in a message
KEPT = 4  # arrays of targets that are held at once: those of a layer's experts

Form = Literal["modules", "stack", "target"]


class Place(NamedTuple):
    """Says where a map, or one expert of it, has its factors in one layer."""

    form: Form
    module: str  # the file's name of it, in our spelling
    named: str  # the name by which patterns find it
    rows: slice = slice(None)  # of a target's outputs
    height: int = 0  # of a target
    experts: int = 0  # in a stack or target


@dataclass(frozen=True)
class _Map:
    """Holds the modules of a map in the layouts that files may have."""

    each: list[Module]  # one for each layer, or each of its experts
    stacks: list[Module]  # one for each layer


class ForeignFactors:
    """Gives the factors of a file as an adapter of this server has them."""

    def __init__(self, file: Any, meaning: Meaning, adapter: AdapterSpec, model: ModelConfig) -> None:
        """``file`` is an open safetensors file; ``meaning`` has been checked.

        Raise InvalidRequest when the file has a factor twice.
        """
        self._file, self._meaning, self._adapter, self._model = file, meaning, adapter, model
        self._scales = Scales(meaning)
        names = list(file.keys())
        self._stored = stored_names(names)
        if len(self._stored) < len(names):
            raise InvalidRequest("the file has factors twice, under names that mean the same")
        self._arrays: dict[str, np.ndarray] = {}
        self._ranks: dict[tuple[str, str], np.ndarray] = {}  # by module and rows of a target
        self._places: dict[tuple[str, Shape], Place] = {}  # of present maps, by map and (layer[, expert])
        self.maps: set[str] = set()  # that have factors
        expected: set[str] = set()  # the spelt names of their factors
        for name, found in self._known_maps().items():
            factors = self._place(name, found)
            if not factors.isdisjoint(self._stored):
                self.maps.add(name)
                expected |= factors
        self.unknown = sorted(self._stored[each] for each in self._stored.keys() - expected)
        self.missing = sorted(
            f"{PREFIX}{each[:-2]}.lora_{each[-1]}.weight" for each in expected - self._stored.keys()
        )

    def check(self) -> None:
        """Compare shapes and types, from the header alone. Raises InvalidRequest."""
        seen: set[str] = set()
        for (name, _), place in self._places.items():
            if name in self.maps and place.module not in seen:
                seen.add(place.module)
                self._check(name, place)

    def tensor(self, module: Module, which: Factor) -> np.ndarray:
        """Return a factor in fp32, in the module's shape and for the adapter's scale; zeros if it is absent.

        Raises InvalidRequest when it does not fit, or holds values that are not finite.
        """
        shape = getattr(module, which)
        made = np.zeros(shape, np.float32)
        if module.map not in self.maps:
            return made
        if len(shape) == 2:
            self._fill(made, module, module.at, which)
            return made
        count = self._model.declared.adapted[module.map].map.experts
        for expert in range(count):
            part = made[min(expert, len(made) - 1)]
            before = part.copy() if len(made) == 1 and expert else None
            self._fill(part, module, (*module.at, expert), which)
            if before is not None and not np.array_equal(before, part):
                raise InvalidRequest(
                    f"the experts of {module.name} have factors of their own, and this server's share the "
                    "one that touches the model width; use a server with --expert-lora per-expert"
                )
            if len(made) == 1 and self._is_shared(module, which):
                break
        return made

    def _fill(self, part: np.ndarray, module: Module, at: Shape, which: Factor) -> None:
        place, most = self._places[module.map, at], module.a[-2]
        factor = self._factor(place, at[-1] if place.experts else 0, which, most)
        rank = factor.shape[0 if which == "a" else 1]
        if rank > most:
            raise InvalidRequest(
                f"{place.module} has rank {rank}, and in an adapter of rank {self._adapter.rank} it has at "
                f"most {most}; set lora_config.rank {-(-self._adapter.rank // most) * rank} "
                "(spmd-tx import --rank)"
            )
        if which == "a":
            part[:rank] = factor
            return
        ratio = self._scales.scale(place.named) / (self._adapter.alpha / most)
        with np.errstate(over="ignore"):
            part[:, :rank] = factor * np.float32(ratio)
        if not np.isfinite(part).all():
            raise InvalidRequest(f"the factors of {place.module} overflow when they are scaled by {ratio:g}")

    def _factor(self, place: Place, expert: int, which: Factor, most: int) -> np.ndarray:
        """Return [R, I] or [O, R] of one expert, without ranks of a target that are those of other maps."""
        array = self._array(f"{place.module}.{which.upper()}", keep=place.form != "modules")
        if place.form == "modules":
            return array
        if place.form == "stack":
            return array[min(expert, len(array) - 1)]
        count, used = max(1, place.experts), self._used(place, most)
        if which == "a":
            return array.reshape(count, -1, array.shape[-1])[expert, used]
        return array.reshape(len(array), -1, count)[place.rows, used, expert]

    def _used(self, place: Place, most: int) -> np.ndarray:
        """Return the ranks of a target that add to a map; if none does yet, as many as there is room for."""
        key = place.module, str(place.rows)
        if key not in self._ranks:
            count = max(1, place.experts)
            b = self._array(f"{place.module}.B", keep=True)
            b_ORX = b.reshape(len(b), -1, count)[place.rows]
            used = np.flatnonzero(b_ORX.any((0, 2)))
            self._ranks[key] = used if used.size else np.arange(min(most, b_ORX.shape[1]))
        return self._ranks[key]

    def _is_shared(self, module: Module, which: Factor) -> bool:
        place = self._places[module.map, (*module.at, 0)]
        stored = self._file.get_slice(self._stored[f"{place.module}.{which.upper()}"])
        return place.form == "stack" and stored.get_shape()[0] == 1

    def _array(self, spelt: str, *, keep: bool) -> np.ndarray:
        found = self._arrays.get(spelt)
        if found is None:
            name = self._stored[spelt]
            found = self._file.get_slice(name)[:].astype(np.float32)
            if not np.isfinite(found).all():
                raise InvalidRequest(f"{name} holds values that are not finite")
            if keep:
                while len(self._arrays) >= KEPT:
                    del self._arrays[next(iter(self._arrays))]
                self._arrays[spelt] = found
        return found

    def _known_maps(self) -> dict[str, _Map]:
        layouts: list[dict[str, list[Module]]] = []
        for layout in EXPERT_LORA:
            found: dict[str, list[Module]] = defaultdict(list)
            for module in modules(self._adapter, replace(self._model, expert_lora=layout)):
                found[module.map].append(module)
            layouts.append(found)
        stacks, each = layouts
        self._heights = _heights(chain.from_iterable(each.values()), self._model)
        return {name: _Map(each[name], stacks[name]) for name in each}

    def _place(self, name: str, found: _Map) -> set[str]:
        """Choose the form in which the file has a map. Return the names of its factors, which it may lack."""
        forms = [dict(self._modules(found.each)), dict(self._stacks(found.stacks)), self._targets(found)]
        chosen = next((form for form in forms if any(map(self._has, form.values()))), forms[0])
        self._places |= {(name, at): place for at, place in chosen.items()}
        return {f"{place.module}.{which}" for place in chosen.values() for which in "AB"}

    def _has(self, place: Place) -> bool:
        return f"{place.module}.A" in self._stored or f"{place.module}.B" in self._stored

    def _modules(self, each: list[Module]) -> Iterator[tuple[Shape, Place]]:
        for module in each:
            spelt = spelling(module.name_a)[:-2]
            yield module.at, Place("modules", spelt, spelt)

    def _stacks(self, stacks: list[Module]) -> Iterator[tuple[Shape, Place]]:
        for module in stacks:
            count = self._model.declared.adapted[module.map].map.experts
            spelt = spelling(module.name_a)[:-2]
            for expert in range(count):
                yield (*module.at, expert), Place("stack", spelt, spelt, experts=count)

    def _targets(self, found: _Map) -> dict[Shape, Place]:
        parameters = " ".join(self._meaning.target_parameters or ())
        has_both = all(name.rpartition(".")[2] in parameters for name in (GATE_UP, DOWN))
        made: dict[Shape, Place] = {}
        for module in found.each:
            declared = self._model.declared.adapted[module.map].map
            target = target_of(module, self._model)
            if declared.experts and target.rpartition(".")[2] not in parameters:
                continue
            name = spelling(f"{PREFIX}{module_of(target, has_both=has_both)}.lora_A.weight")[:-2]
            height, rows = self._heights[target], rows_of(declared)[0]
            made[module.at] = Place("target", name, target, rows, height, declared.experts)
        return made

    def _check(self, name: str, place: Place) -> None:
        declared = self._model.declared.adapted[name].map
        a, b = (self._file.get_slice(self._stored[f"{place.module}.{which}"]) for which in "AB")
        rank, count = self._scales.rank(place.named), max(1, place.experts)
        if place.form == "stack":
            many_a, many_b = (1 if declared.outer_factor == factor else count for factor in FACTORS)
            if len(a.get_shape()) == 3 and a.get_shape()[0] == b.get_shape()[0] == count > 1:
                many_a, many_b, rank = (
                    count,
                    count,
                    a.get_shape()[1],
                )  # of a server whose experts share nothing
            shapes = (many_a, rank, declared.width_in), (many_b, declared.width_out, rank)
        elif place.form == "target":
            shapes = (count * rank, declared.width_in), (place.height, rank * count)
        else:
            shapes = (rank, declared.width_in), (declared.width_out, rank)
        for which, stored, shape in zip("AB", (a, b), shapes, strict=True):
            stored_name = self._stored[f"{place.module}.{which}"]
            if tuple(stored.get_shape()) != shape:
                raise InvalidRequest(
                    f"{stored_name} has the shape {stored.get_shape()}; it must be {list(shape)}"
                )
            if stored.get_dtype() not in DTYPES:
                raise InvalidRequest(
                    f"{stored_name} has the type {stored.get_dtype()}; it must be one of {', '.join(DTYPES)}"
                )


class Most(NamedTuple):
    """Says how large a file can be."""

    tensors: int
    numbers: int


def most_of(adapter: AdapterSpec, model: ModelConfig) -> Most:
    """Return the bounds on a file in the forms that take most."""
    own = list(modules(adapter, model))
    each = sum(1 for _ in modules(adapter, replace(model, expert_lora="per-expert")))
    heights = _heights(own, model)
    in_own_form = in_targets = 0
    for module in own:
        in_own_form += math.prod(module.a) + math.prod(module.b)
        declared = model.declared.adapted[module.map].map
        ranks = module.a[-2] * (declared.experts if len(module.a) == 3 else 1)
        in_targets += ranks * (declared.width_in + heights[target_of(module, model)])
    return Most(2 * each, max(in_own_form, in_targets))


def _heights(own: Iterable[Module], model: ModelConfig) -> dict[str, int]:
    """Return how many outputs each target has up to the last adapted one."""
    found: dict[str, int] = {}
    for module in own:
        target, height = target_of(module, model), rows_of(model.declared.adapted[module.map].map)[1]
        found[target] = max(height, found.get(target, 0))
    return found


def some(names: list[str]) -> str:
    """Show the first of some names."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(name[:200] for name in names[:SHOWN]) + more
