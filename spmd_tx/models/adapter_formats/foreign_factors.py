"""Reads an adapter's file, in any form that PEFT and hosted Tinker write, as factors of this model. No JAX.

A map of experts is stored as one module for each of them, as hosted Tinker's stack of all of them, or as
PEFT's pair for a parameter of transformers; other maps have a pair of their own, or are part of PEFT's pair
for a matrix that holds several maps. Ranks and scales may differ between modules (``rank_pattern``,
``alpha_pattern``): lower ranks are padded with zeros, and B takes up what the scale differs. Modules that the
configuration does not select have none. Those of parts that are not served, as a vision tower, are left out.

Dimension key: X expert, R rank, I input width, O output width.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np

from spmd_tx.errors import InvalidRequest
from spmd_tx.models.adapter_formats.files import (
    PREFIX,
    TENSOR,
    AdapterModule,
    ArrayShape,
    modules,
    spelling,
    stored_names,
)
from spmd_tx.models.adapter_formats.meaning import Meaning
from spmd_tx.models.adapter_formats.peft_targets import DOWN, GATE_UP, heights, module_of, rows_of, target_of
from spmd_tx.models.declared.model import EXPERT_LORA, FACTORS, Factor, Model
from spmd_tx.protocol.commands import AdapterSpec

DTYPES = ("F64", "F32", "BF16", "F16")
SHOWN, SHOWN_CHARACTERS = 3, 200  # names in a message, and characters of a value
COPIED = (
    "lm_head.base_layer.weight",
    "lm_head.weight",
    "embed_tokens.weight",
    "embed_tokens.base_layer.weight",
)
KEPT = 4  # arrays of targets that are held at once: those of a layer's experts

FactorForm = Literal["modules", "stack", "target"]


class FactorPlace(NamedTuple):
    """Says where a map, or one expert of it, has its factors in one layer."""

    form: FactorForm
    module: str  # the file's name of it, in our spelling
    named: str  # the name by which patterns find it
    rows: slice = slice(None)  # of a target's outputs
    height: int = 0  # of a target
    experts: int = 0  # in a stack or target


@dataclass(frozen=True)
class _Map:
    """Holds the modules of a map in the layouts that files may have."""

    each: list[AdapterModule]  # one for each layer, or each of its experts
    stacks: list[AdapterModule]  # one for each layer


class ForeignFactors:
    """Gives the factors of a file as an adapter of this server has them."""

    def __init__(self, file: Any, meaning: Meaning, adapter: AdapterSpec, model: Model) -> None:
        """``file`` is an open safetensors file; ``meaning`` has been checked.

        Raise InvalidRequest when the file has a factor twice.
        """
        self._file, self._meaning, self._adapter, self._model = file, meaning, adapter, model
        self._stored = _stored(file, model)
        self._arrays: dict[str, np.ndarray] = {}
        self._ranks: dict[tuple[str, str], np.ndarray] = {}  # by module and rows of a target
        self._places: dict[
            tuple[str, ArrayShape], FactorPlace
        ] = {}  # of present maps, by map and (layer[, expert])
        self.maps: set[str] = set()  # that have factors
        for name, layouts in self._maps().items():
            chosen = self._chosen(layouts)
            if any(map(self._has, chosen.values())):
                self.maps.add(name)
                self._places |= {(name, at): place for at, place in chosen.items()}

    @property
    def unknown(self) -> list[str]:
        """The tensors that are no factor of the adapter."""
        expected = {f"{place.module}.{which}" for place in self._places.values() for which in "AB"}
        return sorted(self._stored[each] for each in self._stored.keys() - expected)

    @property
    def remedy(self) -> str:
        """What helps against unknown tensors."""
        if any(name.endswith(COPIED) for name in self.unknown):
            return (
                "PEFT saves the embedding and the head beside factors of the head; if they are the base "
                "model's, save the adapter again with save_embedding_layers=False"
            )
        return "is it an adapter of another base model?"

    @property
    def missing(self) -> list[str]:
        """The factors that maps with factors lack, of a pair or of a selected module."""
        missing = {
            f"{PREFIX}{place.module}.lora_{which}.weight"
            for place in self._places.values()
            for which in "AB"
            if f"{place.module}.{which}" not in self._stored
            and (self._has(place) or self._left_out_by(place) is None)
        }
        return sorted(missing)

    def has(self, module: AdapterModule) -> bool:
        """Whether the file has factors of a module, or of one of its experts."""
        if module.map not in self.maps:
            return False
        count = self._model.adapted[module.map].map.experts if len(module.a) == 3 else 0
        ats = [(*module.at, expert) for expert in range(count)] or [module.at]
        return any(self._has(self._places[module.map, at]) for at in ats)

    def ranks(self) -> Iterator[tuple[str, int]]:
        """Yield the map and the rank of each module that has factors."""
        for (name, _), place in self._places.items():
            if self._has(place):
                yield name, self._rank(place)

    def check(self) -> None:
        """Compare shapes, types and what is selected, from the header alone. Raises InvalidRequest."""
        seen: set[str] = set()
        for (name, _), place in self._places.items():
            if place.module not in seen and all(f"{place.module}.{each}" in self._stored for each in "AB"):
                seen.add(place.module)
                self._check(name, place)
                field = self._left_out_by(place)
                if field is not None:
                    value = repr(getattr(self._meaning, field))[:SHOWN_CHARACTERS]
                    raise InvalidRequest(
                        f"the file has {self._stored[f'{place.module}.A']}, and {field} is {value}, by which "
                        "peft leaves it out; correct one of them"
                    )

    def tensor(self, module: AdapterModule, which: Factor) -> np.ndarray:
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
        count = self._model.adapted[module.map].map.experts
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

    def _fill(self, part: np.ndarray, module: AdapterModule, at: ArrayShape, which: Factor) -> None:
        place, most = self._places[module.map, at], module.a[-2]
        if not self._has(place):
            return
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
        ratio = self._meaning.scales.scale(*self._names(place)) / (self._adapter.alpha / most)
        with np.errstate(over="ignore"):
            part[:, :rank] = factor * np.float32(ratio)
        if not np.isfinite(part).all():
            raise InvalidRequest(f"the factors of {place.module} overflow when they are scaled by {ratio:g}")

    def _factor(self, place: FactorPlace, expert: int, which: Factor, most: int) -> np.ndarray:
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

    def _used(self, place: FactorPlace, most: int) -> np.ndarray:
        """Return the ranks of a target that add to a map; if none does yet, as many as there is room for."""
        key = place.module, str(place.rows)
        if key not in self._ranks:
            count = max(1, place.experts)
            b = self._array(f"{place.module}.B", keep=True)
            b_ORX = b.reshape(len(b), -1, count)[place.rows]
            used = np.flatnonzero(b_ORX.any((0, 2)))
            self._ranks[key] = used if used.size else np.arange(min(most, b_ORX.shape[1]))
        return self._ranks[key]

    def _is_shared(self, module: AdapterModule, which: Factor) -> bool:
        place = self._places[module.map, (*module.at, 0)]
        if not self._has(place):
            return False
        stored = self._file.get_slice(self._stored[f"{place.module}.{which.upper()}"])
        return place.form == "stack" and stored.get_shape()[0] == 1

    def _array(self, spelt: str, *, keep: bool) -> np.ndarray:
        array = self._arrays.get(spelt)
        if array is None:
            name = self._stored[spelt]
            array = self._file.get_slice(name)[:].astype(np.float32)
            if not np.isfinite(array).all():
                raise InvalidRequest(f"{name} holds values that are not finite")
            if keep:
                while len(self._arrays) >= KEPT:
                    del self._arrays[next(iter(self._arrays))]
                self._arrays[spelt] = array
        return array

    def _maps(self) -> dict[str, _Map]:
        layouts: list[dict[str, list[AdapterModule]]] = []
        for layout in EXPERT_LORA:
            layers: dict[str, list[AdapterModule]] = defaultdict(list)
            for module in modules(self._adapter, replace(self._model, expert_lora=layout)):
                layers[module.map].append(module)
            layouts.append(layers)
        stacks, each = layouts
        self._heights = heights(chain.from_iterable(each.values()), self._model)
        return {name: _Map(each[name], stacks[name]) for name in each}

    def _chosen(self, layouts: _Map) -> dict[ArrayShape, FactorPlace]:
        """Return the places of a map in the form in which the file has it; the first one if it has none."""
        forms = [
            dict(self._modules(layouts.each)),
            dict(self._stacks(layouts.stacks)),
            self._targets(layouts),
        ]
        return next((form for form in forms if any(map(self._has, form.values()))), forms[0])

    def _names(self, place: FactorPlace) -> tuple[str, ...]:
        """Return the names by which patterns find a module: our spelling, and that of the file."""
        stored = self._stored.get(f"{place.module}.A")
        match = TENSOR.fullmatch(stored) if stored and place.form == "modules" else None
        return (place.named, match["module"].removeprefix(PREFIX)) if match else (place.named,)

    def _rank(self, place: FactorPlace) -> int:
        if self._shares_nothing(place):
            return self._file.get_slice(self._stored[f"{place.module}.A"]).get_shape()[1]
        return self._meaning.scales.rank(*self._names(place))

    def _shares_nothing(self, place: FactorPlace) -> bool:
        """Whether it is the stack of a server whose experts have factors and a rank of their own."""
        if place.form != "stack" or place.experts < 2:
            return False
        a, b = (self._file.get_slice(self._stored[f"{place.module}.{which}"]).get_shape() for which in "AB")
        return len(a) == 3 and a[0] == b[0] == place.experts

    def _left_out_by(self, place: FactorPlace) -> str | None:
        is_alike = place.form == "modules"
        return self._meaning.selection.left_out_by(self._names(place), is_alike=is_alike)

    def _has(self, place: FactorPlace) -> bool:
        return f"{place.module}.A" in self._stored or f"{place.module}.B" in self._stored

    def _modules(self, each: list[AdapterModule]) -> Iterator[tuple[ArrayShape, FactorPlace]]:
        for module in each:
            spelt = spelling(module.name_a)[:-2]
            yield module.at, FactorPlace("modules", spelt, spelt)

    def _stacks(self, stacks: list[AdapterModule]) -> Iterator[tuple[ArrayShape, FactorPlace]]:
        for module in stacks:
            count = self._model.adapted[module.map].map.experts
            spelt = spelling(module.name_a)[:-2]
            for expert in range(count):
                yield (*module.at, expert), FactorPlace("stack", spelt, spelt, experts=count)

    def _targets(self, layouts: _Map) -> dict[ArrayShape, FactorPlace]:
        parameters = " ".join(self._meaning.target_parameters or ())
        has_both = all(name.rpartition(".")[2] in parameters for name in (GATE_UP, DOWN))
        made: dict[ArrayShape, FactorPlace] = {}
        for module in layouts.each:
            declared = self._model.adapted[module.map].map
            target = target_of(module, self._model)
            if declared.experts and target.rpartition(".")[2] not in parameters:
                continue
            name = spelling(f"{PREFIX}{module_of(target, has_both=has_both)}.lora_A.weight")[:-2]
            height, rows = self._heights[target], rows_of(declared)[0]
            made[module.at] = FactorPlace("target", name, target, rows, height, declared.experts)
        return made

    def _check(self, name: str, place: FactorPlace) -> None:
        declared = self._model.adapted[name].map
        a, b = (self._file.get_slice(self._stored[f"{place.module}.{which}"]) for which in "AB")
        rank, count = self._rank(place), max(1, place.experts)
        if place.form == "stack":
            is_own = self._shares_nothing(place)
            many_a, many_b = (
                1 if declared.outer_factor == each and not is_own else count for each in FACTORS
            )
            shapes = (many_a, rank, declared.width_in), (many_b, declared.width_out, rank)
        elif place.form == "target":
            shapes = (count * rank, declared.width_in), (place.height, rank * count)
        else:
            shapes = (rank, declared.width_in), (declared.width_out, rank)
        for which, stored, shape in zip("AB", (a, b), shapes, strict=True):
            stored_name = self._stored[f"{place.module}.{which}"]
            if tuple(stored.get_shape()) != shape:
                raise InvalidRequest(
                    f"{stored_name} has the shape {stored.get_shape()}; it must be {list(shape)} "
                    f"for {self._model.architecture} with {self._model.d_model} channels, and rank {rank}; "
                    "is it an adapter of another base model?"
                )
            if stored.get_dtype() not in DTYPES:
                raise InvalidRequest(
                    f"{stored_name} has the type {stored.get_dtype()}; it must be one of {', '.join(DTYPES)}"
                )


def _stored(file: Any, model: Model) -> dict[str, str]:
    """Return the names of a file's factors, by their names in ``spelling``. Raises InvalidRequest."""
    stored: Iterable[str] = file.keys()
    names: dict[str, list[str]] = defaultdict(list)
    for name in stored:
        if not is_of_other_part(name, model):
            names[spelling(name)].append(name)
    for each in names.values():
        if len(each) > 1:
            raise InvalidRequest(
                f"the file has factors twice, under names that mean the same: {' and '.join(each)}; save the "
                "adapter again"
            )
    return stored_names(chain.from_iterable(names.values()))


def is_of_other_part(tensor: str, model: Model) -> bool:
    """Whether it is a factor of a part of the base model that is not served, as its vision tower."""
    match = TENSOR.fullmatch(tensor)
    if match is None:
        return False
    module = match["module"].removeprefix(PREFIX)
    names = module, module.removeprefix("model."), f"model.{module}"
    return any(
        name.startswith(model.further) or any(re.fullmatch(pattern, name) for pattern in model.ignored)
        for name in names
    )


def some(names: list[str]) -> str:
    """Show the first of some names."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(name[:200] for name in names[:SHOWN]) + more
