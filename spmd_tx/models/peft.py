"""Reads and writes one adapter as a PEFT folder, as Hugging Face peft and many servers load it.

Experts that share their outer factors are written as hosted Tinker writes them: ``mlp.experts.w1`` (gate),
``w3`` (up) and ``w2`` (down) have a lora_A [experts or 1, rank, in] and a lora_B [experts or 1, out, rank],
where 1 is the factor of all experts.

Experts with factors of their own are separate linear maps, as in the model's checkpoint: expert N has the
modules ``mlp.experts.N.gate_proj``, ``up_proj`` and ``down_proj``, each with a lora_A and a lora_B. Their
rank, and so their scale alpha / rank, differs from the adapter's: ``rank_pattern`` in adapter_config.json
gives it.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from spmd_tx.durable_files import make_folder, put_in_place, sync, unique_beside
from spmd_tx.errors import MeshError
from spmd_tx.models.config import ModelConfig
from spmd_tx.models.declared.layers import HEAD
from spmd_tx.models.declared.maps import Group
from spmd_tx.models.lora import LAYER_GROUPS, Adapters, Lora, has_experts, names, rank_of, shapes, widths
from spmd_tx.protocol.commands import AdapterSpec

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
ALIGNMENT = 8  # bytes, of the tensors in a safetensors file
BUFFER_BYTES = 1 << 20
SHARED_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}  # of maps whose outer factors experts share


def write(
    path: Path, adapters: Adapters[np.ndarray], adapter: AdapterSpec, model: ModelConfig, base_model: str
) -> None:
    """Write the folder durably and atomically, replacing an earlier one of that name.

    Shapes are A [L, R, in] and B [L, R, out], the head's without L, experts' own [L, X, ...]; rows beyond the
    adapter's rank are padding.
    """
    tensors: dict[str, np.ndarray] = {}
    for name in _trained(adapter, model):
        rank = rank_of(model, name, adapter.rank)
        for prefix, factors in _modules(model, name, _pair(adapters, name)):
            tensors[f"{prefix}.lora_A.weight"] = factors.a[..., :rank, :]
            tensors[f"{prefix}.lora_B.weight"] = factors.b[..., :rank, :].swapaxes(-1, -2)
    config = json.dumps(_config(adapter, model, base_model), indent=2) + "\n"
    _write_folder(
        path,
        {
            WEIGHTS_FILE: partial(_write_tensors, tensors),
            CONFIG_FILE: lambda file: file.write(config.encode()),
        },
    )


def read(path: Path, adapter: AdapterSpec, model: ModelConfig, rank: int) -> Adapters[np.ndarray]:
    """Return the adapter in fp32, padded with zeros to ``rank``; untrained groups are zero.

    Raises MeshError when the folder does not hold the adapter, which the coordinator has checked before.
    """
    adapters = _zeros(model, rank)
    file = path / WEIGHTS_FILE
    try:
        with safe_open(file, framework="np") as tensors:
            for name in _trained(adapter, model):
                width_in, width_out = widths(model)[name]
                used = rank_of(model, name, adapter.rank)
                for prefix, factors in _modules(model, name, _pair(adapters, name)):
                    a = tensors.get_tensor(f"{prefix}.lora_A.weight")
                    b = tensors.get_tensor(f"{prefix}.lora_B.weight")
                    _check(file, prefix, a, (*factors.a.shape[:-2], used, width_in))
                    _check(file, prefix, b, (*factors.b.shape[:-2], width_out, used))
                    factors.a[..., :used, :] = a
                    factors.b[..., :used, :] = b.swapaxes(-1, -2)
    except (SafetensorError, OSError) as problem:
        raise MeshError(f"cannot read {file}: {problem}") from problem
    return adapters


def _trained(adapter: AdapterSpec, model: ModelConfig) -> tuple[str, ...]:
    groups: list[Group] = []
    if adapter.train_attn:
        groups.append("attn")
    if adapter.train_mlp:
        groups.append("mlp")
    if adapter.train_unembed:
        groups.append("unembed")
    return names(model, *groups)


def _pair(adapters: Adapters[np.ndarray], name: str) -> Lora[np.ndarray]:
    return adapters.head if name == HEAD else adapters.layers[name]


def _modules(
    model: ModelConfig, name: str, factors: Lora[np.ndarray]
) -> Iterator[tuple[str, Lora[np.ndarray]]]:
    """Yield the name of every linear map, one per layer (and expert) or the head's, and views of its factors.

    Experts that share a factor are one map with factors [experts or 1, ...].
    """
    found = model.declared.adapted[name]
    module = found.map.adapter_module
    if found.map.experts and model.expert_lora == "shared-outer":
        experts = module.partition("{expert}")[0]
        for layer, number in enumerate(found.numbers or ()):
            module = experts.format(layer=number) + SHARED_NAMES[found.map.name]
            own = (factor[layer] for factor in (factors.a, factors.b))
            yield f"base_model.model.{module}", Lora(*(x if x.ndim == 3 else x[None] for x in own))
        return
    for index in np.ndindex(factors.a.shape[:-2]):
        numbers = {} if found.numbers is None else {"layer": found.numbers[index[0]], "expert": index[-1]}
        yield f"base_model.model.{module.format(**numbers)}", Lora(factors.a[index], factors.b[index])


def _zeros(model: ModelConfig, rank: int) -> Adapters[np.ndarray]:
    def pair(name: str) -> Lora[np.ndarray]:
        its = shapes(model, name, rank)
        return Lora(np.zeros(its.a, np.float32), np.zeros(its.b, np.float32))

    return Adapters({name: pair(name) for name in names(model, *LAYER_GROUPS)}, pair(HEAD))


def _check(file: Path, prefix: str, factor: np.ndarray, expected: tuple[int, ...]) -> None:
    if factor.shape != expected:
        raise MeshError(
            f"{file}: a factor of {prefix} has the shape {list(factor.shape)}; it must be {list(expected)}"
        )
    if not np.isfinite(factor).all():
        raise MeshError(f"{file}: a factor of {prefix} is not finite")


def _config(adapter: AdapterSpec, model: ModelConfig, base_model: str) -> dict[str, Any]:
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "target_modules": [_last_part(model, name) for name in _trained(adapter, model)],
        "bias": "none",
        "lora_dropout": 0.0,
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    if model.n_experts and adapter.train_mlp and model.expert_lora == "per-expert":
        config["rank_pattern"] = {
            rf"mlp\.experts\.\d+\.{_last_part(model, name)}": rank_of(model, name, adapter.rank)
            for name in names(model, "mlp")
            if has_experts(model, name)
        }
    return config


def _last_part(model: ModelConfig, name: str) -> str:
    """Return the last part of a module's name, "q_proj"."""
    return model.declared.adapted[name].map.adapter_module.rpartition(".")[2]


def _write_tensors(tensors: Mapping[str, np.ndarray], file: BinaryIO) -> None:
    """Write a safetensors file of float32, the same bytes as the library, but one tensor after the other.

    The library builds the whole file in memory, and no other thread runs while it does.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(tensors):
        start, end = end, end + 4 * tensors[name].size
        header[name] = {"dtype": "F32", "shape": tensors[name].shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in sorted(tensors):
        file.write(np.ascontiguousarray(tensors[name], "<f4").data)


def _write_folder(path: Path, writers: dict[str, Callable[[BinaryIO], object]]) -> None:
    """Write under a temporary name beside the path, then rename."""
    unfinished = unique_beside(path, "partial")  # a process that was given up may still write this folder
    try:
        make_folder(unfinished)
        for name, write_content in writers.items():
            with open(unfinished / name, "wb", buffering=BUFFER_BYTES) as file:
                write_content(file)
                file.flush()
                os.fsync(file.fileno())
        sync(unfinished)
        replaced = put_in_place(unfinished, path)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
