"""Checks an adapter from outside, and writes it as this server writes its own. All functions block.

Nothing but this module reads the files of clients: workers, which would be lost over a file that they cannot
read, get what is written here.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open

from spmd_tx.durable_files import make_folder
from spmd_tx.errors import InvalidRequest
from spmd_tx.models.adapter_formats.base_names import are_same
from spmd_tx.models.adapter_formats.file_bounds import most_of
from spmd_tx.models.adapter_formats.files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterModule,
    config_of,
    modules,
    trained_maps,
    write_tensors,
)
from spmd_tx.models.adapter_formats.foreign_factors import Factor, ForeignFactors, some
from spmd_tx.models.adapter_formats.meaning import Meaning, read_meaning
from spmd_tx.models.declared.model import Model
from spmd_tx.protocol.commands import AdapterSpec

FILES = (CONFIG_FILE, WEIGHTS_FILE)
MOST_CONFIG_BYTES = 1 << 20
HEADER_BYTES_PER_TENSOR = 512
SPARE_HEADER_BYTES = 1 << 20
BUFFER_BYTES = 1 << 20
FLAGS = ("train_attn", "train_mlp", "train_unembed")


def most_bytes(adapter: AdapterSpec, model: Model) -> dict[str, int]:
    """Return how many bytes each file of an adapter can have, in the form that takes most."""
    most = most_of(adapter, model)
    return {CONFIG_FILE: MOST_CONFIG_BYTES, WEIGHTS_FILE: _most_of_header(most.tensors) + 8 * most.numbers}


def _most_of_header(tensors: int) -> int:
    return SPARE_HEADER_BYTES + HEADER_BYTES_PER_TENSOR * tensors


def convert(
    folder: Path, place: Path, announced: AdapterSpec, model: Model, base_models: Sequence[str]
) -> AdapterSpec:
    """Read FILES in ``folder``, and write them in fp32 under our names into a new folder ``place``.

    ``base_models`` are the names of the base model; the first one is written. Modules without factors get
    zeros, which mean the same and stay untrained. Raises InvalidRequest, perhaps after a part was written,
    unless the files fit what was announced, whose alpha does not count.
    """
    config = _read_config(folder / CONFIG_FILE, announced, model, base_models)
    # An adapter of a higher rank than the file's has the file's scale.
    adapter = msgspec.structs.replace(announced, alpha=config.alpha * (announced.rank / config.r))
    adapted = list(modules(adapter, model))
    _check_header_size(folder / WEIGHTS_FILE, _most_of_header(most_of(adapter, model).tensors))
    try:
        with safe_open(folder / WEIGHTS_FILE, framework="np") as tensors:
            factors = ForeignFactors(tensors, config, adapter, model)
            factors.check()  # first, as shapes tell most of another base model
            _check_names(factors, adapted, adapter, model)
            shapes = {name: shape for module in adapted for name, shape in module.shapes.items()}
            places: dict[str, tuple[AdapterModule, Factor]] = {}
            for module in adapted:
                places |= {module.name_a: (module, "a"), module.name_b: (module, "b")}
            make_folder(place)
            with open(place / WEIGHTS_FILE, "wb", buffering=BUFFER_BYTES) as file:
                write_tensors(file, shapes, lambda name: factors.tensor(*places[name]))
    except SafetensorError as problem:
        raise InvalidRequest(f"{WEIGHTS_FILE} is not a safetensors file, or is damaged: {problem}") from None
    (place / CONFIG_FILE).write_bytes(config_of(adapter, model, base_models[0]))
    return adapter


def _read_config(path: Path, announced: AdapterSpec, model: Model, base_models: Sequence[str]) -> Meaning:
    """Read and check the configuration, whose ``r`` is the announced rank unless modules may have others."""
    config = read_meaning(path.read_bytes(), CONFIG_FILE)
    named = config.base_model_name_or_path
    if named and not any(are_same(named, each) for each in base_models):
        raise InvalidRequest(
            f"{CONFIG_FILE} names the base model {named!r}, and the upload is for {base_models[-1]!r}; "
            "if they are the same, correct base_model_name_or_path"
        )
    may_be_lower = bool(config.rank_pattern) or model.expert_lora == "per-expert"
    if config.r > announced.rank or (config.r < announced.rank and not may_be_lower):
        raise InvalidRequest(f"r of {CONFIG_FILE} is {config.r}, and lora_config.rank is {announced.rank}")
    return config


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
    factors: ForeignFactors, adapted: list[AdapterModule], adapter: AdapterSpec, model: Model
) -> None:
    """Raise InvalidRequest for factors that the adapter cannot have, and for those that it lacks."""
    if factors.unknown:
        flags = ", ".join(f"{flag} {getattr(adapter, flag)}" for flag in FLAGS)
        targets = sorted({module.name.rpartition(".")[2] for module in adapted})
        raise InvalidRequest(
            f"{WEIGHTS_FILE} has {some(factors.unknown)}; adapters of this model with {flags} have factors "
            f"of {', '.join(targets)} alone"
            + (f", {model.expert_lora} ones of experts" if model.n_experts else "")
            + f"; {factors.remedy}"
        )
    for flag, maps in _maps_by_flag(adapter, model).items():
        if not factors.maps & maps:
            raise InvalidRequest(f"{flag} is true, and {WEIGHTS_FILE} has no factor that it trains")
    if factors.missing:
        raise InvalidRequest(
            f"{WEIGHTS_FILE} lacks {some(factors.missing)}; a map has factors in all layers that "
            f"{CONFIG_FILE} selects, or in none"
        )


def _maps_by_flag(adapter: AdapterSpec, model: Model) -> dict[str, set[str]]:
    """Return the maps that each flag of the adapter trains."""
    none = dict.fromkeys(FLAGS, False)
    return {
        flag: set(trained_maps(msgspec.structs.replace(adapter, **none | {flag: True}), model))
        for flag in FLAGS
        if getattr(adapter, flag)
    }
