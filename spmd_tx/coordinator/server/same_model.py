"""Keeps a data directory to one base model, whose adapters fit no other one."""

import logging

import msgspec

from spmd_tx.config import ServerConfig
from spmd_tx.durable_files import make_folder, write_file
from spmd_tx.errors import StartError
from spmd_tx.models.config import ModelConfig

logger = logging.getLogger(__name__)

RECORD = "base_model.json"  # file in the data directory
SIZES = ("n_layers", "d_model", "d_ff", "n_heads", "n_kv_heads", "head_dim", "n_experts", "vocab_size")


class Record(msgspec.Struct):
    """Identifies the base model of a data directory."""

    base_model: str  # as --base-model had it at first
    architecture: str
    sizes: dict[str, int]
    trains_all_weights: bool = False
    base_dtype: str = "auto"
    dtype: str = "auto"


def check_same_model(config: ServerConfig, model: ModelConfig) -> None:
    """Raise StartError if the data directory belongs to a base model of another shape. Blocks.

    It belongs to adapters or to whole models, too. A new data directory is from now on this model's.
    """
    file = config.data_dir / RECORD
    sizes = {name: getattr(model, name) for name in SIZES}
    record = Record(
        base_model=config.base_model,
        architecture=model.architecture,
        sizes=sizes,
        trains_all_weights=config.full_parameters,
        base_dtype=config.base_dtype,
        dtype=config.dtype,
    )
    if not file.exists():
        make_folder(config.data_dir)
        write_file(file, msgspec.json.encode(record))
        return
    try:
        known = msgspec.json.decode(file.read_bytes(), type=Record)
    except msgspec.DecodeError as error:
        raise StartError(f"{file} is damaged: {error}; delete it if the base model has not changed") from None
    differences = [
        f"{name} is {found} and was {before}"
        for name, found, before in (
            ("the architecture", model.architecture, known.architecture),
            *((name, sizes[name], known.sizes.get(name)) for name in SIZES),
        )
        if found != before
    ]
    if differences:
        raise StartError(
            f"--base-model {config.base_model} is another model than {known.base_model}, whose adapters are "
            f"in {config.data_dir}: {', '.join(differences)}; give --base-model that one, or set another "
            "--data-dir"
        )
    if known.trains_all_weights != config.full_parameters:
        before, now = ("all weights", "without") if known.trains_all_weights else ("adapters", "with")
        raise StartError(
            f"{config.data_dir} is of a server that trains {before}, and this one is {now} "
            "--full-parameters; start it as before, or set another --data-dir"
        )
    for option, before, now in (
        ("--base-dtype", known.base_dtype, config.base_dtype),
        ("--dtype", known.dtype, config.dtype),
    ):
        if before != now:
            logger.warning(
                "%s was %s at the last start and is %s now: models continue, but with other numbers, so "
                "their losses change, and steps since the last snapshot are run again with other results",
                option,
                before,
                now,
            )
    if (known.base_dtype, known.dtype) != (config.base_dtype, config.dtype):
        write_file(file, msgspec.json.encode(record))
