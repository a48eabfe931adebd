"""The record of the base models that a data directory has had: their names, and what their adapters fit."""

import msgspec

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.bases.served_base import BaseHistory
from spmd_tx.durable_files import make_folder, write_file
from spmd_tx.errors import UNREADABLE, StartError
from spmd_tx.group_names import MAIN

FILE = "bases.json"  # in the data directory
# Where there is none, these files of earlier versions describe the first base.
MODEL_FILE, LAYOUT_FILE = "base_model.json", "expert_lora"


class ModelRecord(msgspec.Struct):
    """Identifies a base model, and what decides its numbers."""

    base_model: str  # as --base-model had it at first
    architecture: str
    sizes: dict[str, int]
    trains_all_weights: bool | None = None  # None: not recorded yet
    base_dtype: str = "auto"
    dtype: str = "auto"
    files: dict[str, str] | None = None  # fingerprints by name; None: not recorded yet
    revision: str | None = None  # as --revision had it at the last start


class BaseRecord(msgspec.Struct):
    """Holds what is known of one base model."""

    key: str  # the first name that it was served under, which never changes
    names: list[str]  # all that it has had; those of the last start come first
    expert_lora: str | None = None  # the layout of factors for experts; None: not settled, or no experts
    model: ModelRecord | None = None  # None: not recorded yet


def read_record(config: ServerConfig) -> BaseRecord:
    """Return the record of the base model of a configuration, with its present names. Blocks.

    The main group's base is still the directory's first one if it is called otherwise now; that of another
    group is a new one then. Raises StartError for a damaged file.
    """
    records = _read(config)
    names = config.model_names
    known = next((each for each in records if not {*names}.isdisjoint(each.names)), None)
    first = next(iter(records), None) if config.group == MAIN else None
    record = known or first or BaseRecord(names[0], [])
    record.names = list(dict.fromkeys([*names, *record.names]))
    return record


def history_of(config: ServerConfig) -> BaseHistory:
    """Return what the base of a group is called in the data directory. Blocks."""
    record = read_record(config)
    return BaseHistory(record.key, tuple(record.names))


def known_bases(config: ServerConfig) -> list[BaseHistory]:
    """Return what the bases of a data directory are called, the first one first. Blocks."""
    return [BaseHistory(record.key, tuple(record.names)) for record in _read(config)]


def keep_records(config: ServerConfig) -> None:
    """Write down what earlier versions of the directory have recorded elsewhere. Blocks.

    ``config`` is the main group's. Its base keeps its place and its names when others come beside it.
    """
    write_record(config, read_record(config))


def write_record(config: ServerConfig, record: BaseRecord) -> None:
    """Put a record in place of the earlier one of its base. Blocks."""
    records = {each.key: each for each in _read(config)} | {record.key: record}
    make_folder(config.data_dir)
    content = msgspec.json.format(msgspec.json.encode(list(records.values())))
    write_file(config.data_dir / FILE, content)


def _read(config: ServerConfig) -> list[BaseRecord]:
    """Return the records in the order in which the directory got its bases."""
    file, model_file, layout_file = (config.data_dir / name for name in (FILE, MODEL_FILE, LAYOUT_FILE))
    try:
        if file.exists():
            return msgspec.json.decode(file.read_bytes(), type=list[BaseRecord])
        first = BaseRecord(config.model_name, [])
        if layout_file.exists():
            first.expert_lora = layout_file.read_text().strip()
        if model_file.exists():
            file = model_file
            first.model = msgspec.json.decode(model_file.read_bytes(), type=ModelRecord)
    except UNREADABLE as error:
        raise StartError(f"{file} is damaged: {error}; restore it from a backup") from None
    return [first] if layout_file.exists() or model_file.exists() else []
