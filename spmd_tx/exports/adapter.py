"""Reads the factors of an adapter from a PEFT folder, ours or another's. No JAX."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from spmd_tx.errors import InvalidRequest, StartError
from spmd_tx.models.adapter_formats.base_names import is_encoded_copy
from spmd_tx.models.adapter_formats.files import CONFIG_FILE, WEIGHTS_FILE, AdapterModule, groups_of, modules
from spmd_tx.models.adapter_formats.foreign_factors import ForeignFactors, some
from spmd_tx.models.adapter_formats.meaning import Meaning, read_meaning
from spmd_tx.models.declared.model import ExpertLora, Factor, Model
from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.protocol.ranks import expert_rank

# Of modules that hold factors of each expert: in a module for each, or in one for a parameter of all.
OF_AN_EXPERT = re.compile(r"\.experts\.(\d+|base_layer|lora_[AB])\.")
OF_EXPERTS = re.compile(r"\.experts\.w[123]\.lora_[AB]\.")


def _read_config(folder: Path) -> Meaning:
    """Raises StartError unless it is the configuration of an adapter that can be exported."""
    path = folder / CONFIG_FILE
    try:
        return read_meaning(path.read_bytes(), path)
    except (FileNotFoundError, NotADirectoryError):
        raise StartError(
            f"{folder} has no {CONFIG_FILE}; name the folder of an adapter, or the tinker:// path of a "
            "checkpoint"
        ) from None
    except InvalidRequest as problem:
        raise StartError(f"this adapter cannot be exported: {problem}") from None
    except OSError as problem:
        raise StartError(f"{path} cannot be read: {problem}") from None


def base_model_of(folder: Path) -> str:
    """Return the base model that the adapter names. Raises StartError."""
    named = _read_config(folder).base_model_name_or_path
    if not named:
        raise StartError(f"{folder / CONFIG_FILE} names no base model; name it with --base-model")
    if is_encoded_copy(named):
        raise StartError(
            f"{folder / CONFIG_FILE} names the base model {named!r}, a copy whose encoding is not read; name "
            "the model that it was made from with --base-model"
        )
    return named


def layout_of(folder: Path) -> ExpertLora:
    """Return the layout of factors of experts in an adapter's file. Raises StartError."""
    file = _opened(folder)
    names = list(file.keys())
    if any(OF_AN_EXPERT.search(name) for name in names):
        return "per-expert"
    stacks: dict[str, list[int]] = {}
    for name in filter(OF_EXPERTS.search, names):
        stacks.setdefault(name.partition(".lora_")[0], []).append(file.get_slice(name).get_shape()[0])
    shares = [1 in counts for counts in stacks.values()]
    return "shared-outer" if all(shares) else "per-expert"


def _opened(folder: Path) -> Any:
    try:
        return safe_open(folder / WEIGHTS_FILE, framework="np")
    except (OSError, SafetensorError) as problem:
        raise StartError(f"{folder} is not a PEFT folder, or is damaged: {problem!r}") from None


class FactorPair(NamedTuple):
    """Holds the factors of one module, in fp32."""

    a: np.ndarray  # [rank, in]; with shared factors [experts or 1, rank, in]
    b: np.ndarray  # [out, rank]; with shared factors [experts or 1, out, rank]


class AdapterFolder:
    """Opens one adapter; its factors are read when they are asked for."""

    def __init__(self, path: Path, model: Model) -> None:
        """Raise StartError unless the folder holds an adapter of the model."""
        self.path = path
        meaning, file = _read_config(path), _opened(path)
        try:
            self.spec = _spec(meaning, file.keys())
            self._factors = ForeignFactors(file, meaning, self.spec, model)
            self._factors.check()  # first, as shapes tell most of another base model
            self._check_names(meaning, model)
            wider = max((_adapter_rank(*each, meaning.r, model) for each in self._factors.ranks()), default=0)
            if wider > meaning.r:
                alpha = meaning.alpha * wider / meaning.r
                self.spec = msgspec.structs.replace(self.spec, rank=wider, alpha=alpha)
                self._factors = ForeignFactors(file, meaning, self.spec, model)
        except InvalidRequest as problem:
            raise StartError(f"{path / WEIGHTS_FILE}: {problem}") from None
        # Of maps that have factors in some layers; those without are zeros.
        self.modules = [module for module in modules(self.spec, model) if module.map in self._factors.maps]
        self._last: tuple[AdapterModule, FactorPair] | None = None

    @property
    def present(self) -> list[AdapterModule]:
        """The modules that have factors."""
        return [module for module in self.modules if self._factors.has(module)]

    def factors(self, module: AdapterModule, expert: int | None = None) -> FactorPair:
        """Read the factors of a module, or of one of its experts, which may share one of the two."""
        if self._last is None or self._last[0] is not module:
            self._last = module, FactorPair(self._tensor(module, "a"), self._tensor(module, "b"))
        a, b = self._last[1]
        return (
            FactorPair(a, b)
            if expert is None
            else FactorPair(*(each[min(expert, len(each) - 1)] for each in (a, b)))
        )

    def scale(self, module: AdapterModule) -> float:
        """What the product of the factors is multiplied by."""
        return self.spec.alpha / module.a[-2]

    def _tensor(self, module: AdapterModule, which: Factor) -> np.ndarray:
        try:
            return self._factors.tensor(module, which)
        except InvalidRequest as problem:
            raise StartError(
                f"{self.path / WEIGHTS_FILE}: {problem}; save the adapter again, or export an earlier one"
            ) from None

    def _check_names(self, meaning: Meaning, model: Model) -> None:
        factors, named = self._factors, meaning.base_model_name_or_path
        if factors.unknown:
            has = sorted({each.map.adapter_module.rpartition(".")[2] for each in model.adapted.values()})
            raise InvalidRequest(
                f"it has {some(factors.unknown)}, and the base model, {model.architecture} with "
                f"{model.n_layers} layers and {model.d_model} channels, has no such map, only "
                f"{', '.join(has)}; it names {named!r}; {factors.remedy}"
            )
        if factors.missing:
            raise InvalidRequest(
                f"it lacks {some(factors.missing)}; a map has factors in all layers that {CONFIG_FILE} "
                "selects, or in none"
            )


def _spec(meaning: Meaning, names: Iterable[str]) -> AdapterSpec:
    groups = groups_of(names)
    if not groups:
        raise InvalidRequest("it has no factors of an adapter (NAME.lora_A.weight); save the adapter again")
    return AdapterSpec(
        rank=meaning.r,
        alpha=meaning.alpha,
        train_attn="attn" in groups,
        train_mlp="mlp" in groups,
        train_unembed="unembed" in groups,
    )


def _adapter_rank(name: str, rank: int, least: int, model: Model) -> int:
    """Return the rank of an adapter in which a map can have a rank, at least ``least``."""
    divisor = model.expert_rank_divisor if model.adapted[name].map.experts else 1
    return least if expert_rank(least, divisor) >= rank else rank * divisor
