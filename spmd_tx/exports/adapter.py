"""Reads the factors of an adapter from a PEFT folder, ours or another's. No JAX."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from spmd_tx.errors import InvalidRequest, StartError
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
from spmd_tx.models.adapter_formats.meaning import Meaning
from spmd_tx.models.config import ModelConfig
from spmd_tx.models.declared.layers import ExpertLora
from spmd_tx.protocol.commands import AdapterSpec

OF_AN_EXPERT = re.compile(r"\.experts\.\d+\.")
DTYPES = ("F64", "F32", "BF16", "F16")  # of factors
# Of fields that change what the factors mean, the values with which an adapter can be exported, beside none.
PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "fan_in_fan_out": False,
    "alpha_pattern": {},
    "modules_to_save": [],
}


class _Config(Meaning):
    """Reads the other fields, too, that change what an adapter means."""

    base_model_name_or_path: str | None = None
    peft_type: str | None = None
    bias: str | None = None
    use_dora: Any = None
    fan_in_fan_out: Any = None
    modules_to_save: Any = None


def _read_config(folder: Path) -> _Config:
    """Raises StartError unless it is the configuration of an adapter that can be exported."""
    path = folder / CONFIG_FILE
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
        config.check()
    except (FileNotFoundError, NotADirectoryError):
        raise StartError(
            f"{folder} has no {CONFIG_FILE}; name the folder of an adapter, or the tinker:// path of a "
            "checkpoint"
        ) from None
    except (OSError, ValueError, RecursionError, InvalidRequest) as problem:
        raise StartError(f"{path} cannot be read, or is damaged: {problem}") from None
    for key, plain in PLAIN.items():
        value = getattr(config, key)
        if value and value != plain:
            raise StartError(
                f"{key} of {path} is {value!r}, which cannot be exported; merge such an adapter with peft"
            )
    return config


def base_model_of(folder: Path) -> str:
    """Return the base model that the adapter names. Raises StartError."""
    named = _read_config(folder).base_model_name_or_path
    if not named:
        raise StartError(f"{folder / CONFIG_FILE} names no base model; name it with --base-model")
    return named


def layout_of(folder: Path) -> ExpertLora:
    """Return the layout of factors of experts in an adapter's file. Raises StartError."""
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="np") as file:
            is_own = any(OF_AN_EXPERT.search(name) for name in file.keys())  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as problem:
        raise StartError(f"{folder} is not a PEFT folder, or is damaged: {problem!r}") from None
    return "per-expert" if is_own else "shared-outer"


class Factors(NamedTuple):
    """Holds the factors of one module, in fp32."""

    a: np.ndarray  # [rank, in]; with shared factors [experts or 1, rank, in]
    b: np.ndarray  # [out, rank]; with shared factors [experts or 1, out, rank]


class AdapterFolder:
    """Opens one adapter; its factors are read when they are asked for."""

    def __init__(self, path: Path, model: ModelConfig) -> None:
        """Raise StartError unless the folder holds an adapter of the model."""
        self.path = path
        config = _read_config(path)
        try:
            self._file = safe_open(path / WEIGHTS_FILE, framework="np")
        except (OSError, SafetensorError) as problem:
            raise StartError(f"{path} is not a PEFT folder, or is damaged: {problem!r}") from None
        stored = list(self._file.keys())
        groups = {group_of_module(found["module"]) for name in stored if (found := TENSOR.fullmatch(name))}
        self.spec = AdapterSpec(
            rank=config.r,
            alpha=alpha_of(config.lora_alpha, config.r, bool(config.use_rslora)),
            train_attn="attn" in groups,
            train_mlp="mlp" in groups,
            train_unembed="unembed" in groups,
        )
        self._stored = stored_names(stored)
        if not groups or len(self._stored) < len(stored):
            what = "has factors twice, under names that mean the same" if groups else "has no factors"
            raise StartError(f"{path / WEIGHTS_FILE} {what}; save the adapter again")
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
        index = None if expert is None else min(expert, stored.get_shape()[0] - 1)
        part = stored[:] if index is None else stored[index : index + 1][0]
        factor = part.astype(np.float32)
        if not np.isfinite(factor).all():
            raise StartError(
                f"{self._stored[spelling(name)]} in {self.path / WEIGHTS_FILE} has numbers that are not "
                "finite; export an earlier checkpoint"
            )
        return factor

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
            stored = self._file.get_slice(self._stored[spelt])
            found = tuple(stored.get_shape())
            if stored.get_dtype() not in DTYPES:
                raise StartError(
                    f"{self._stored[spelt]} in {self.path / WEIGHTS_FILE} has the type {stored.get_dtype()}; "
                    f"factors have {', '.join(DTYPES)}"
                )
            if found != shape:
                raise StartError(
                    f"{self._stored[spelt]} in {self.path / WEIGHTS_FILE} has the shape {list(found)}, and "
                    f"for this base model it must be {list(shape)}; is it an adapter of another one?"
                )
