"""Writes an adapter for other libraries: as hosted Tinker has it, or as PEFT loads it. No JAX.

models/adapter_formats/peft_targets.py says what PEFT adapts.

Dimension key: X expert, R rank, I input width, O output width.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from spmd_tx.exports.adapter import AdapterFolder, base_model_of, layout_of
from spmd_tx.exports.staging import identity, staged
from spmd_tx.models.adapter_formats.files import (
    CONFIG_FILE,
    PREFIX,
    SHARED_NAMES,
    WEIGHTS_FILE,
    AdapterModule,
    ArrayShape,
    config_of,
    write_tensors,
)
from spmd_tx.models.adapter_formats.peft_targets import DOWN, GATE_UP, module_of, rows_of, target_of
from spmd_tx.models.config import read_model_config
from spmd_tx.models.declared.model import HEAD, Model

AdapterFormat = Literal["peft", "tinker"]

HOSTED_HEAD = f"{PREFIX}model.unembed_tokens"
GPT_OSS = "GptOssForCausalLM"  # whose attention has another name in hosted Tinker
BUFFER_BYTES = 1 << 20


class StoredTensor(NamedTuple):
    """Holds the shape of a tensor of the result, and how to make it."""

    shape: ArrayShape
    make: Callable[[], np.ndarray]


AdapterFiles = tuple[dict[str, StoredTensor], bytes]  # the tensors and the configuration


def export_adapter(
    folder: Path, model_dir: Path, out: Path, form: AdapterFormat, base_model: str | None = None
) -> None:
    """Write the adapter in ``folder`` to the new folder ``out``, as ``form`` has it. Raises StartError.

    ``base_model`` is named in the result; None: what the adapter names. Of ``model_dir`` only config.json is
    read.
    """
    model = read_model_config(model_dir, layout_of(folder))
    adapter = AdapterFolder(folder, model)
    base_model = base_model or base_model_of(folder)
    tensors, config = (_for_peft if form == "peft" else _as_hosted)(adapter, model, base_model)
    with staged(out, identity(folder, format=form, base_model=base_model)) as place:
        shapes = {name: stored.shape for name, stored in tensors.items()}
        with (place / WEIGHTS_FILE).open("wb", buffering=BUFFER_BYTES) as file:
            write_tensors(file, shapes, lambda name: tensors[name].make())
        (place / CONFIG_FILE).write_bytes(config)


def _as_hosted(adapter: AdapterFolder, model: Model, base_model: str) -> AdapterFiles:
    """Name and stack factors as hosted Tinker does, where all of them have the same scale."""
    tensors: dict[str, StoredTensor] = {}
    of_experts: dict[str, list[AdapterModule]] = defaultdict(list)
    for module in adapter.modules:
        name = HOSTED_HEAD if module.map == HEAD else module.name
        if model.architecture == GPT_OSS:
            name = name.replace(".self_attn.", ".attn.")
        declared = model.adapted[module.map].map
        if declared.experts and model.expert_lora == "per-expert":
            of_experts[f"{name.partition('.experts.')[0]}.experts.{SHARED_NAMES[declared.name]}"].append(
                module
            )
        else:
            tensors |= _pair(name, _factor(adapter, module, "a"), _factor(adapter, module, "b"))
    for name, experts in of_experts.items():
        tensors |= _pair(name, _stack(adapter, experts, "a"), _stack(adapter, experts, "b"))
    layout = replace(model, expert_lora="shared-outer")  # the ranks of the result
    return tensors, config_of(adapter.spec, layout, base_model)


def _pair(module: str, a: StoredTensor, b: StoredTensor) -> dict[str, StoredTensor]:
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def _factor(adapter: AdapterFolder, module: AdapterModule, which: Literal["a", "b"]) -> StoredTensor:
    return StoredTensor(getattr(module, which), lambda: getattr(adapter.factors(module), which))


def _stack(adapter: AdapterFolder, experts: list[AdapterModule], which: Literal["a", "b"]) -> StoredTensor:
    """Stack the factors of all experts; B takes up what their scale differs from the adapter's."""
    scale = np.float32(adapter.scale(experts[0]) / adapter.spec.scale if which == "b" else 1)
    return StoredTensor(
        (len(experts), *getattr(experts[0], which)),
        lambda: scale * np.stack([getattr(adapter.factors(module), which) for module in experts]),
    )


@dataclass(frozen=True)
class _Part:
    """Holds the modules of one map in a matrix, or in those of all experts."""

    modules: list[AdapterModule]  # one, or that of each expert
    rows: slice  # of the matrix, along its outputs
    rank: int


@dataclass(frozen=True)
class _Target:
    """Holds the maps in one matrix of transformers, or in a parameter with those of all experts."""

    adapter: AdapterFolder
    parts: list[_Part]
    experts: int  # 0: it is a matrix
    width_in: int
    width_out: int

    @property
    def rank(self) -> int:
        return sum(part.rank for part in self.parts)

    @property
    def alpha(self) -> float:
        return self.adapter.spec.alpha * self.rank / self.parts[0].rank

    def a(self) -> StoredTensor:
        def make() -> np.ndarray:
            a_XRI = np.concatenate([self._each(part, "a") for part in self.parts], axis=1)
            return a_XRI.reshape(-1, self.width_in)

        return StoredTensor((max(1, self.experts) * self.rank, self.width_in), make)

    def b(self) -> StoredTensor:
        def make() -> np.ndarray:
            b_ORX = np.zeros((self.width_out, self.rank, max(1, self.experts)), np.float32)
            first = 0
            for part in self.parts:
                b_ORX[part.rows, first : first + part.rank] = self._each(part, "b").transpose(1, 2, 0)
                first += part.rank
            return b_ORX.reshape(self.width_out, -1)

        return StoredTensor((self.width_out, self.rank * max(1, self.experts)), make)

    def _each(self, part: _Part, which: Literal["a", "b"]) -> np.ndarray:
        """Return a factor of each expert, also where they share it: [X, R, I] or [X, O, R]."""
        factors = [getattr(self.adapter.factors(module), which) for module in part.modules]
        array = np.stack(factors) if factors[0].ndim == 2 else factors[0]
        return np.broadcast_to(array, (max(1, self.experts), *array.shape[1:]))


def _for_peft(adapter: AdapterFolder, model: Model, base_model: str) -> AdapterFiles:
    targets = _targets(adapter, model)
    tensors: dict[str, StoredTensor] = {}
    has_both = all(any(name.endswith(each) for name in targets) for each in (GATE_UP, DOWN))
    for name, target in targets.items():
        tensors |= _pair(PREFIX + module_of(name, has_both=has_both), target.a(), target.b())
    return tensors, _config(adapter, model, base_model, targets)


def _targets(adapter: AdapterFolder, model: Model) -> dict[str, _Target]:
    """Return the targets by their names in transformers."""
    modules: dict[tuple[str, str], list[AdapterModule]] = defaultdict(list)  # by target and map
    for module in adapter.modules:
        modules[target_of(module, model), module.map].append(module)
    targets: dict[str, _Target] = {}
    for (name, map_name), group in modules.items():
        declared = model.adapted[map_name].map
        rows, height = rows_of(declared)
        part = _Part(group, rows, group[0].a[-2])
        if name in targets:
            seen = targets[name]
            targets[name] = replace(seen, parts=[*seen.parts, part], width_out=max(seen.width_out, height))
        else:
            targets[name] = _Target(adapter, [part], declared.experts, declared.width_in, height)
    return targets


def _config(adapter: AdapterFolder, model: Model, base_model: str, targets: dict[str, _Target]) -> bytes:
    plain = config_of(adapter.spec, replace(model, expert_lora="shared-outer"), base_model)
    config: dict[str, Any] = json.loads(plain)
    # In models with experts, PEFT takes modules with these names for experts of transformers 4; as parameters
    # they are what they are.
    as_parameters = {
        name
        for name in targets
        if model.n_experts and name.endswith((".gate_proj", ".up_proj", ".down_proj"))
    }
    parameters = {_end_of(name, 2) + ".weight" for name in as_parameters}
    parameters |= {_end_of(name, 3) for name, target in targets.items() if target.experts}
    matrices = {name for name, target in targets.items() if not target.experts} - as_parameters
    config["target_modules"] = sorted({_end_of(name, 1) for name in matrices})
    if parameters:
        config["target_parameters"] = sorted(parameters)
    config["rank_pattern"], config["alpha_pattern"] = _patterns(adapter, targets, min(matrices, default=None))
    return (json.dumps(config, indent=2) + "\n").encode()


def _patterns(
    adapter: AdapterFolder, targets: dict[str, _Target], matrix: str | None
) -> tuple[dict[str, int], dict[str, float]]:
    """Return the ranks and alphas of targets that have others than the adapter, by what PEFT finds them with.

    PEFT follows patterns of parameters, but warns that it ignored those that match no module. So these match
    ``matrix`` as well, one of the targets, after a pattern that says what it has.
    """
    by_pattern: dict[str, _Target] = {}
    for name, target in targets.items():
        if (target.rank, target.alpha) != (adapter.spec.rank, adapter.spec.alpha):
            by_pattern[re.escape(_end_of(name, 3 if target.experts else 1))] = target
    if matrix is not None and any(target.experts for target in by_pattern.values()):
        key = re.escape(_end_of(matrix, 1))
        by_pattern = {key: targets[matrix]} | {
            f"{each}|{key}" if target.experts else each: target for each, target in by_pattern.items()
        }
    ranks, alphas = (
        {key: getattr(each, field) for key, each in by_pattern.items()} for field in ("rank", "alpha")
    )
    return ranks, alphas


def _end_of(name: str, parts: int) -> str:
    return ".".join(name.split(".")[-parts:])
