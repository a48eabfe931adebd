"""Checks an adapter from outside, and writes it as this server writes its own. All functions block.

Nothing but this module reads the files of clients: workers, which would be lost over a file that they cannot
read, get what is written here.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from spmd_tx.durable_files import make_folder
from spmd_tx.errors import InvalidRequest
from spmd_tx.models.adapter_files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Module,
    Shape,
    config_of,
    modules,
    spelling,
    stored_names,
    trained_maps,
    write_tensors,
)
from spmd_tx.models.config import ModelConfig
from spmd_tx.protocol.commands import AdapterSpec

FILES = (CONFIG_FILE, WEIGHTS_FILE)
DTYPES = ("F32", "BF16", "F16")
MOST_CONFIG_BYTES = 1 << 20
HEADER_BYTES_PER_TENSOR = 512
SPARE_HEADER_BYTES = 1 << 20
BUFFER_BYTES = 1 << 20
FLAGS = ("train_attn", "train_mlp", "train_unembed")
SHOWN = 3  # names in a message


class _Config(msgspec.Struct):
    """Reads the fields of adapter_config.json that change what an adapter means."""

    r: int
    lora_alpha: float
    base_model_name_or_path: str | None = None
    peft_type: str | None = "LORA"
    bias: str | None = "none"
    fan_in_fan_out: bool | None = False
    use_rslora: bool | None = False
    use_dora: bool | None = False
    alpha_pattern: dict[str, Any] | None = None
    modules_to_save: list[str] | None = None


def most_bytes(adapter: AdapterSpec, model: ModelConfig) -> dict[str, int]:
    """Return how many bytes each file of an adapter can have."""
    sizes = [math.prod(shape) for module in modules(adapter, model) for shape in (module.a, module.b)]
    return {CONFIG_FILE: MOST_CONFIG_BYTES, WEIGHTS_FILE: _most_of_header(len(sizes)) + 4 * sum(sizes)}


def _most_of_header(tensors: int) -> int:
    return SPARE_HEADER_BYTES + HEADER_BYTES_PER_TENSOR * tensors


def convert(
    folder: Path, place: Path, announced: AdapterSpec, model: ModelConfig, base_models: Sequence[str]
) -> AdapterSpec:
    """Read FILES in ``folder``, and write them in fp32 under our names into a new folder ``place``.

    ``base_models`` are the names of the base model; the first one is written. Maps without factors get zeros,
    which mean the same and stay untrained. Raises InvalidRequest, perhaps after a part was written, unless
    the files fit what was announced, whose alpha does not count.
    """
    adapter = _read_config(folder / CONFIG_FILE, announced, base_models)
    wanted = {module.name: module for module in modules(adapter, model)}
    shapes = {name: shape for module in wanted.values() for name, shape in module.shapes.items()}
    _check_header_size(folder / WEIGHTS_FILE, _most_of_header(len(shapes)))
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="np") as tensors:
            names = list(tensors.keys())
            stored = stored_names(names)
            if len(stored) < len(names):
                raise InvalidRequest(f"{WEIGHTS_FILE} has factors twice, under names that mean the same")
            _check_names(stored, list(wanted.values()), adapter, model)
            for name, shape in shapes.items():
                if spelling(name) in stored:
                    _check_header(stored[spelling(name)], tensors, shape)

            def tensor(name: str) -> np.ndarray:
                key = stored.get(spelling(name))
                return np.zeros(shapes[name], np.float32) if key is None else _in_fp32(key, tensors)

            make_folder(place)
            with open(place / WEIGHTS_FILE, "wb", buffering=BUFFER_BYTES) as file:
                write_tensors(file, shapes, tensor)
    except SafetensorError as problem:
        raise InvalidRequest(f"{WEIGHTS_FILE} is not a safetensors file, or is damaged: {problem}") from None
    (place / CONFIG_FILE).write_bytes(config_of(adapter, model, base_models[0]))
    return adapter


def _read_config(path: Path, announced: AdapterSpec, base_models: Sequence[str]) -> AdapterSpec:
    """Return the announced adapter with the alpha of the file."""
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as problem:
        raise InvalidRequest(f"{CONFIG_FILE} cannot be read: {problem}") from None
    named = config.base_model_name_or_path
    if named and _last_part(named) not in map(_last_part, base_models):
        raise InvalidRequest(
            f"{CONFIG_FILE} names the base model {named!r}, and the upload is for {base_models[-1]!r}; "
            "if they are the same, correct base_model_name_or_path"
        )
    if config.r != announced.rank:
        raise InvalidRequest(f"r of {CONFIG_FILE} is {config.r}, and lora_config.rank is {announced.rank}")
    different = {
        "peft_type": (config.peft_type or "LORA", "LORA"),
        "bias": (config.bias or "none", "none"),
        "fan_in_fan_out": (bool(config.fan_in_fan_out), False),
        "use_dora": (bool(config.use_dora), False),
        "alpha_pattern": (config.alpha_pattern or {}, {}),
        "modules_to_save": (config.modules_to_save or [], []),
    }
    for name, (value, served) in different.items():
        if value != served:
            raise InvalidRequest(f"{name} of {CONFIG_FILE} is {value!r}; this server has {served!r} only")
    if not (math.isfinite(config.lora_alpha) and config.lora_alpha > 0):
        raise InvalidRequest(f"lora_alpha of {CONFIG_FILE} is {config.lora_alpha}; it must be positive")
    # Rank-stabilised LoRA (Kalajdzievski 2023) scales by alpha / sqrt(r) instead of alpha / r.
    alpha = config.lora_alpha * math.sqrt(config.r) if config.use_rslora else config.lora_alpha
    return msgspec.structs.replace(announced, alpha=alpha)


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].partition(":")[0].casefold()


def _check_header_size(path: Path, most: int) -> None:
    """Raise InvalidRequest for a header that takes far more memory to read than those of such adapters."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > most:
        raise InvalidRequest(
            f"{path.name} is not a safetensors file, or is damaged: its header has {size} bytes, and that of "
            f"such an adapter has at most {most}"
        )


def _check_names(
    stored: Mapping[str, str], wanted: list[Module], adapter: AdapterSpec, model: ModelConfig
) -> None:
    """Raise InvalidRequest for factors that the adapter cannot have, and for those that it lacks."""
    expected = {spelling(name): (module.map, name) for module in wanted for name in module.shapes}
    odd = sorted(stored[each] for each in stored.keys() - expected.keys())
    if odd:
        flags = ", ".join(f"{flag} {getattr(adapter, flag)}" for flag in FLAGS)
        targets = sorted({module.name.rpartition(".")[2] for module in wanted})
        raise InvalidRequest(
            f"{WEIGHTS_FILE} has {_some(odd)}; adapters of this model with {flags} have factors of "
            f"{', '.join(targets)} alone"
            + (f", {model.expert_lora} ones of experts" if model.n_experts else "")
        )
    present = {expected[each][0] for each in stored}
    for flag, maps in _maps_by_flag(adapter, model).items():
        if not present & maps:
            raise InvalidRequest(f"{flag} is true, and {WEIGHTS_FILE} has no factor that it trains")
    missing = [name for each, (map, name) in expected.items() if map in present and each not in stored]
    if missing:
        raise InvalidRequest(
            f"{WEIGHTS_FILE} lacks {_some(missing)}; a map has factors in all layers, or in none"
        )


def _maps_by_flag(adapter: AdapterSpec, model: ModelConfig) -> dict[str, set[str]]:
    """Return the maps that each flag of the adapter trains."""
    none = dict.fromkeys(FLAGS, False)
    return {
        flag: set(trained_maps(msgspec.structs.replace(adapter, **none | {flag: True}), model))
        for flag in FLAGS
        if getattr(adapter, flag)
    }


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(name[:200] for name in names[:SHOWN]) + more


def _check_header(name: str, tensors: Any, expected: Shape) -> None:
    found = tensors.get_slice(name)
    shape, dtype = found.get_shape(), found.get_dtype()
    if tuple(shape) != expected:
        raise InvalidRequest(f"{name} has the shape {list(shape)}; it must be {list(expected)}")
    if dtype not in DTYPES:
        raise InvalidRequest(f"{name} has the type {dtype}; it must be one of {', '.join(DTYPES)}")


def _in_fp32(name: str, tensors: Any) -> np.ndarray:
    array = tensors.get_tensor(name).astype(np.float32)
    if not np.isfinite(array).all():
        raise InvalidRequest(f"{name} holds values that are not finite")
    return array
