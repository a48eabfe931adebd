"""Reads the factors of an adapter from a PEFT folder, ours or another's. No JAX."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from spmd_tx.errors import StartError
from spmd_tx.models.adapter_formats.files import (
    CONFIG_FILE,
    TENSOR,
    WEIGHTS_FILE,
    Module,
    alpha_of,
    group_of_module,
    modules,
    spelling,
    stored_names,
)
from spmd_tx.models.config import ModelConfig
from spmd_tx.models.declared.layers import ExpertLora
from spmd_tx.protocol.commands import AdapterSpec

OF_AN_EXPERT = re.compile(r"\.experts\.\d+\.")


def base_model_of(folder: Path) -> str:
    """Return the base model that the adapter names. Raises StartError."""
    try:
        return json.loads((folder / CONFIG_FILE).read_bytes())["base_model_name_or_path"] or ""
    except FileNotFoundError:
        raise StartError(
            f"{folder} has no {CONFIG_FILE}; name the folder of an adapter, or the tinker:// path of a "
            "checkpoint"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise StartError(
            f"{folder / CONFIG_FILE} names no base model ({problem!r}); name it with --base-model"
        ) from None


def layout_of(folder: Path) -> ExpertLora:
    """Return the layout of factors of experts in an adapter's file. Raises StartError."""
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="np") as file:
            is_own = any(OF_AN_EXPERT.search(name) for name in file.keys())  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as problem:
        raise StartError(f"{folder} is not a PEFT folder, or is damaged: {problem!r}") from None
    return "per-expert" if is_own else "shared-outer"


def _check_plain(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise StartError for what would change the meaning of the factors."""
    for key in ("use_dora", "fan_in_fan_out", "alpha_pattern", "modules_to_save"):
        if config.get(key):
            raise StartError(
                f"{key} of {folder / CONFIG_FILE} is {config[key]!r}, which cannot be exported; "
                "merge such an adapter with peft"
            )


class Factors(NamedTuple):
    """Holds the factors of one module, in fp32."""

    a: np.ndarray  # [rank, in]; with shared factors [experts or 1, rank, in]
    b: np.ndarray  # [out, rank]; with shared factors [experts or 1, out, rank]


class AdapterFolder:
    """Opens one adapter; its factors are read when they are asked for."""

    def __init__(self, path: Path, model: ModelConfig) -> None:
        """Raise StartError unless the folder holds an adapter of the model."""
        self.path = path
        try:
            config = json.loads((path / CONFIG_FILE).read_bytes())
            self._file = safe_open(path / WEIGHTS_FILE, framework="np")
            stored = list(self._file.keys())
            _check_plain(path, config)
            groups = {
                group_of_module(found["module"]) for name in stored if (found := TENSOR.fullmatch(name))
            }
            self.spec = AdapterSpec(
                rank=int(config["r"]),
                alpha=alpha_of(float(config["lora_alpha"]), int(config["r"]), bool(config.get("use_rslora"))),
                train_attn="attn" in groups,
                train_mlp="mlp" in groups,
                train_unembed="unembed" in groups,
            )
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as problem:
            raise StartError(f"{path} is not a PEFT folder, or is damaged: {problem!r}") from None
        self._stored = stored_names(stored)
        self.modules = list(modules(self.spec, model))
        self._check(model)

    def factors(self, module: Module, expert: int | None = None) -> Factors:
        """Read the factors of a module, or of one of its experts, which may share one of the two."""
        a, b = (self._tensor(name, expert) for name in (module.name_a, module.name_b))
        return Factors(a, b)

    def scale(self, module: Module) -> float:
        """What the product of the factors is multiplied by."""
        return self.spec.alpha / module.a[-2]

    def _tensor(self, name: str, expert: int | None) -> np.ndarray:
        stored = self._file.get_slice(self._stored[spelling(name)])
        if expert is None:
            return stored[:].astype(np.float32)
        index = min(expert, stored.get_shape()[0] - 1)
        return stored[index : index + 1][0].astype(np.float32)

    def _check(self, model: ModelConfig) -> None:
        wanted = {spelling(name): shape for module in self.modules for name, shape in module.shapes.items()}
        for spelt, name in self._stored.items():
            if spelt not in wanted:
                raise StartError(
                    f"{self.path / WEIGHTS_FILE} has {name}, and {model.declared.architecture} has no such "
                    "map; is it an adapter of another base model?"
                )
        for spelt, shape in wanted.items():
            if spelt not in self._stored:
                raise StartError(f"{self.path / WEIGHTS_FILE} lacks factors of {spelt.rpartition('.')[0]}")
            found = tuple(self._file.get_slice(self._stored[spelt]).get_shape())
            if found != shape:
                raise StartError(
                    f"{self._stored[spelt]} in {self.path / WEIGHTS_FILE} has the shape {list(found)}, and "
                    f"for this base model it must be {list(shape)}; is it an adapter of another one?"
                )
