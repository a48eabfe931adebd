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
    Module,
    Shape,
    config_of,
    write_tensors,
)
from spmd_tx.models.adapter_formats.peft_targets import DOWN, GATE_UP, module_of, rows_of, target_of
from spmd_tx.models.config import ModelConfig, read_model_config
from spmd_tx.models.declared.layers import HEAD

AdapterFormat = Literal["peft", "tinker"]

HOSTED_HEAD = f"{PREFIX}model.unembed_tokens"
GPT_OSS = "GptOssForCausalLM"  # whose attention has another name in hosted Tinker
BUFFER_BYTES = 1 << 20


class Stored(NamedTuple):
    """Holds the shape of a tensor of the result, and how to make it."""

    shape: Shape
    make: Callable[[], np.ndarray]


class Content(NamedTuple):
    """Holds what the two files of an adapter have."""

    tensors: dict[str, Stored]
    config: bytes


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
    content = (_for_peft if form == "peft" else _as_hosted)(adapter, model, base_model)
    with staged(out, identity(folder, format=form, base_model=base_model)) as place:
        shapes = {name: stored.shape for name, stored in content.tensors.items()}
        with (place / WEIGHTS_FILE).open("wb", buffering=BUFFER_BYTES) as file:
            write_tensors(file, shapes, lambda name: content.tensors[name].make())
        (place / CONFIG_FILE).write_bytes(content.config)


def _as_hosted(adapter: AdapterFolder, model: ModelConfig, base_model: str) -> Content:
    """Name and stack factors as hosted Tinker does, where all of them have the same scale."""
    tensors: dict[str, Stored] = {}
    of_experts: dict[str, list[Module]] = defaultdict(list)
    for module in adapter.modules:
        name = HOSTED_HEAD if module.map == HEAD else module.name
        if model.declared.architecture == GPT_OSS:
            name = name.replace(".self_attn.", ".attn.")
        declared = model.declared.adapted[module.map].map
        if declared.experts and model.expert_lora == "per-expert":
            of_experts[f"{name.partition('.experts.')[0]}.experts.{SHARED_NAMES[declared.name]}"].append(
                module
            )
        else:
            tensors |= _pair(name, _factor(adapter, module, "a"), _factor(adapter, module, "b"))
    for name, own in of_experts.items():
        tensors |= _pair(name, _stack(adapter, own, "a"), _stack(adapter, own, "b"))
    layout = replace(model, expert_lora="shared-outer")  # the ranks of the result
    return Content(tensors, config_of(adapter.spec, layout, base_model))


def _pair(module: str, a: Stored, b: Stored) -> dict[str, Stored]:
    return {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}


def _factor(adapter: AdapterFolder, module: Module, which: Literal["a", "b"]) -> Stored:
    return Stored(getattr(module, which), lambda: getattr(adapter.factors(module), which))


def _stack(adapter: AdapterFolder, own: list[Module], which: Literal["a", "b"]) -> Stored:
    """Stack the factors of all experts; B takes up what their scale differs from the adapter's."""
    scale = np.float32(adapter.scale(own[0]) / adapter.spec.scale if which == "b" else 1)
    return Stored(
        (len(own), *getattr(own[0], which)),
        lambda: scale * np.stack([getattr(adapter.factors(module), which) for module in own]),
    )


@dataclass(frozen=True)
class _Part:
    """Holds the modules of one map in a matrix, or in those of all experts."""

    modules: list[Module]  # one, or that of each expert
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
    is_parameter: bool  # whether PEFT finds it by target_parameters
    padded: int = 0  # ranks of zeros
    scale: float = 0.0  # what PEFT multiplies the product by; 0.0: that of the parts

    @property
    def rank(self) -> int:
        return sum(part.rank for part in self.parts) + self.padded

    @property
    def own_scale(self) -> float:
        return self.adapter.scale(self.parts[0].modules[0])

    @property
    def alpha(self) -> float:
        return (self.scale or self.own_scale) * self.rank

    def a(self) -> Stored:
        def make() -> np.ndarray:
            zeros = np.zeros((max(1, self.experts), self.padded, self.width_in), np.float32)
            a_XRI = np.concatenate([*(self._each(part, "a") for part in self.parts), zeros], axis=1)
            return a_XRI.reshape(-1, self.width_in)

        return Stored((max(1, self.experts) * self.rank, self.width_in), make)

    def b(self) -> Stored:
        ratio = np.float32(self.own_scale / self.scale if self.scale else 1.0)

        def make() -> np.ndarray:
            b_ORX = np.zeros((self.width_out, self.rank, max(1, self.experts)), np.float32)
            first = 0
            for part in self.parts:
                each = self._each(part, "b").transpose(1, 2, 0)
                b_ORX[part.rows, first : first + part.rank] = ratio * each
                first += part.rank
            return b_ORX.reshape(self.width_out, -1)

        return Stored((self.width_out, self.rank * max(1, self.experts)), make)

    def _each(self, part: _Part, which: Literal["a", "b"]) -> np.ndarray:
        """Return a factor of each expert, also where they share it: [X, R, I] or [X, O, R]."""
        found = [getattr(self.adapter.factors(module), which) for module in part.modules]
        array = np.stack(found) if found[0].ndim == 2 else found[0]
        return np.broadcast_to(array, (max(1, self.experts), *array.shape[1:]))


def _for_peft(adapter: AdapterFolder, model: ModelConfig, base_model: str) -> Content:
    targets = _with_alike_parameters(_targets(adapter, model))
    tensors: dict[str, Stored] = {}
    has_both = all(any(name.endswith(each) for name in targets) for each in (GATE_UP, DOWN))
    for name, target in targets.items():
        tensors |= _pair(PREFIX + module_of(name, has_both=has_both), target.a(), target.b())
    return Content(tensors, _config(adapter, model, base_model, targets))


def _targets(adapter: AdapterFolder, model: ModelConfig) -> dict[str, _Target]:
    """Return the targets by their names in transformers."""
    modules: dict[tuple[str, str], list[Module]] = defaultdict(list)  # by target and map
    for module in adapter.modules:
        modules[target_of(module, model), module.map].append(module)
    found: dict[str, _Target] = {}
    for (name, map_name), own in modules.items():
        declared = model.declared.adapted[map_name].map
        rows, height = rows_of(declared)
        part = _Part(own, rows, own[0].a[-2])
        if name in found:
            seen = found[name]
            found[name] = replace(seen, parts=[*seen.parts, part], width_out=max(seen.width_out, height))
        else:
            # In models with experts, PEFT takes modules with these names for experts of transformers 4; as
            # parameters they are what they are.
            is_taken = bool(model.n_experts) and name.endswith((".gate_proj", ".up_proj", ".down_proj"))
            is_parameter = bool(declared.experts) or is_taken
            found[name] = _Target(adapter, [part], declared.experts, declared.width_in, height, is_parameter)
    return found


def _with_alike_parameters(targets: dict[str, _Target]) -> dict[str, _Target]:
    """Give all parameters the same rank and scale: those that PEFT has for what no pattern names.

    It follows patterns for parameters, but warns that it ignored them.
    """
    parameters = {name: target for name, target in targets.items() if target.is_parameter}
    if not parameters:
        return targets
    most = max(parameters.values(), key=lambda target: target.rank)
    return targets | {
        name: replace(target, padded=most.rank - target.rank, scale=most.own_scale)
        for name, target in parameters.items()
    }


def _config(
    adapter: AdapterFolder, model: ModelConfig, base_model: str, targets: dict[str, _Target]
) -> bytes:
    plain = config_of(adapter.spec, replace(model, expert_lora="shared-outer"), base_model)
    config: dict[str, Any] = json.loads(plain)
    parameters = {name: target for name, target in targets.items() if target.is_parameter}
    matrices = {name: target for name, target in targets.items() if not target.is_parameter}
    config["target_modules"] = sorted({_end_of(name, 1) for name in matrices})
    if parameters:
        ends = {_end_of(name, 3) for name, target in parameters.items() if target.experts}
        ends |= {f"{_end_of(name, 2)}.weight" for name, target in parameters.items() if not target.experts}
        config["target_parameters"] = sorted(ends)
        alike = next(iter(parameters.values()))
        config["r"], config["lora_alpha"] = alike.rank, alike.alpha
    ranks, alphas = config["rank_pattern"], config["alpha_pattern"] = {}, {}
    for name, target in matrices.items():
        if (target.rank, target.alpha) != (config["r"], config["lora_alpha"]):
            key = re.escape(_end_of(name, 1))
            ranks[key], alphas[key] = target.rank, target.alpha
    return (json.dumps(config, indent=2) + "\n").encode()


def _end_of(name: str, parts: int) -> str:
    return ".".join(name.split(".")[-parts:])
