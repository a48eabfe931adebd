"""Checks an adapter from outside, and writes it as this server writes its own. All functions block.

Nothing but this module reads the files of clients: workers, which would be lost over a file that they cannot
read, get what is written here.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open

from spmd_tx.durable_files import make_folder
from spmd_tx.errors import UNREADABLE, InvalidRequest
from spmd_tx.models.adapter_formats.files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Module,
    alpha_of,
    config_of,
    modules,
    trained_maps,
    write_tensors,
)
from spmd_tx.models.adapter_formats.foreign_factors import Factor, ForeignFactors, most_of, some
from spmd_tx.models.adapter_formats.meaning import Meaning
from spmd_tx.models.config import ModelConfig
from spmd_tx.protocol.commands import AdapterSpec

FILES = (CONFIG_FILE, WEIGHTS_FILE)
MOST_CONFIG_BYTES = 1 << 20
HEADER_BYTES_PER_TENSOR = 512
SPARE_HEADER_BYTES = 1 << 20
BUFFER_BYTES = 1 << 20
FLAGS = ("train_attn", "train_mlp", "train_unembed")


class _Config(Meaning):
    """Reads the other fields, too, that change what an adapter means."""

    base_model_name_or_path: str | None = None
    peft_type: str | None = "LORA"
    bias: str | None = "none"
    fan_in_fan_out: bool | None = False
    use_dora: bool | None = False
    modules_to_save: list[str] | None = None


def most_bytes(adapter: AdapterSpec, model: ModelConfig) -> dict[str, int]:
    """Return how many bytes each file of an adapter can have, in the form that takes most."""
    most = most_of(adapter, model)
    return {CONFIG_FILE: MOST_CONFIG_BYTES, WEIGHTS_FILE: _most_of_header(most.tensors) + 4 * most.numbers}


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
    config = _read_config(folder / CONFIG_FILE, announced, model, base_models)
    # An adapter of a higher rank than the file's has the file's scale.
    alpha = alpha_of(config.lora_alpha, config.r, bool(config.use_rslora)) * (announced.rank / config.r)
    adapter = msgspec.structs.replace(announced, alpha=alpha)
    wanted = list(modules(adapter, model))
    _check_header_size(folder / WEIGHTS_FILE, _most_of_header(most_of(adapter, model).tensors))
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="np") as tensors:
            factors = ForeignFactors(tensors, config, adapter, model)
            _check_names(factors, wanted, adapter, model)
            factors.check()
            shapes = {name: shape for module in wanted for name, shape in module.shapes.items()}
            places: dict[str, tuple[Module, Factor]] = {}
            for module in wanted:
                places |= {module.name_a: (module, "a"), module.name_b: (module, "b")}
            make_folder(place)
            with open(place / WEIGHTS_FILE, "wb", buffering=BUFFER_BYTES) as file:
                write_tensors(file, shapes, lambda name: factors.tensor(*places[name]))
    except SafetensorError as problem:
        raise InvalidRequest(f"{WEIGHTS_FILE} is not a safetensors file, or is damaged: {problem}") from None
    (place / CONFIG_FILE).write_bytes(config_of(adapter, model, base_models[0]))
    return adapter


def _read_config(
    path: Path, announced: AdapterSpec, model: ModelConfig, base_models: Sequence[str]
) -> _Config:
    """Read and check the configuration, whose ``r`` is the announced rank unless modules may have others."""
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_Config)
    except (*UNREADABLE, RecursionError) as problem:
        raise InvalidRequest(f"{CONFIG_FILE} cannot be read: {problem}") from None
    named = config.base_model_name_or_path
    if named and _last_part(named) not in map(_last_part, base_models):
        raise InvalidRequest(
            f"{CONFIG_FILE} names the base model {named!r}, and the upload is for {base_models[-1]!r}; "
            "if they are the same, correct base_model_name_or_path"
        )
    may_be_lower = bool(config.rank_pattern) or model.expert_lora == "per-expert"
    if config.r > announced.rank or (config.r < announced.rank and not may_be_lower):
        raise InvalidRequest(f"r of {CONFIG_FILE} is {config.r}, and lora_config.rank is {announced.rank}")
    if config.use_dora:
        raise InvalidRequest(
            f"use_dora of {CONFIG_FILE} is True, and this server trains plain LoRA, which has no magnitudes; "
            "merge the adapter into its base model with peft, and serve the result"
        )
    different = {
        "peft_type": (config.peft_type or "LORA", "LORA"),
        "bias": (config.bias or "none", "none"),
        "fan_in_fan_out": (bool(config.fan_in_fan_out), False),
        "modules_to_save": (config.modules_to_save or [], []),
    }
    for name, (value, served) in different.items():
        if value != served:
            raise InvalidRequest(f"{name} of {CONFIG_FILE} is {value!r}; this server has {served!r} only")
    config.check()
    return config


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
    factors: ForeignFactors, wanted: list[Module], adapter: AdapterSpec, model: ModelConfig
) -> None:
    """Raise InvalidRequest for factors that the adapter cannot have, and for those that it lacks."""
    if factors.unknown:
        flags = ", ".join(f"{flag} {getattr(adapter, flag)}" for flag in FLAGS)
        targets = sorted({module.name.rpartition(".")[2] for module in wanted})
        raise InvalidRequest(
            f"{WEIGHTS_FILE} has {some(factors.unknown)}; adapters of this model with {flags} have factors "
            f"of {', '.join(targets)} alone"
            + (f", {model.expert_lora} ones of experts" if model.n_experts else "")
        )
    for flag, maps in _maps_by_flag(adapter, model).items():
        if not factors.maps & maps:
            raise InvalidRequest(f"{flag} is true, and {WEIGHTS_FILE} has no factor that it trains")
    if factors.missing:
        raise InvalidRequest(
            f"{WEIGHTS_FILE} lacks {some(factors.missing)}; a map has factors in all layers, or in none"
        )


def _maps_by_flag(adapter: AdapterSpec, model: ModelConfig) -> dict[str, set[str]]:
    """Return the maps that each flag of the adapter trains."""
    none = dict.fromkeys(FLAGS, False)
    return {
        flag: set(trained_maps(msgspec.structs.replace(adapter, **none | {flag: True}), model))
        for flag in FLAGS
        if getattr(adapter, flag)
    }
