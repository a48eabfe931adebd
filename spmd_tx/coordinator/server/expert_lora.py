"""Settles the layout of adapters of experts, which is the same for all adapters of a data directory."""

from dataclasses import replace

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.server.base_records import read_record, write_record
from spmd_tx.errors import StartError
from spmd_tx.models.config import layout_named
from spmd_tx.models.declared.model import Model
from spmd_tx.options import AUTO

BEFORE_RECORDS = "snapshots"  # folder in data directories; there it is alone where no layout was recorded


def with_expert_lora(config: ServerConfig, model: Model) -> Model:
    """Return the model with the layout of the data directory, or else the one that is asked for. Blocks.

    Adapters of one layout cannot be brought into the other. Raises StartError where another one is asked for.
    """
    if not model.n_experts:
        return model
    record = read_record(config)
    known = record.expert_lora
    if known is None and (config.data_dir / BEFORE_RECORDS).exists():
        known = "per-expert"  # which was the only one
    wanted = config.expert_lora
    if known is not None and wanted not in (AUTO, known):
        raise StartError(
            f"--expert-lora is {wanted}, but the adapters in {config.data_dir} are {known}; "
            "leave it out, or set another --data-dir"
        )
    chosen = known or config.planned_expert_lora
    if record.expert_lora is None:
        record.expert_lora = chosen
        write_record(config, record)
    return replace(model, expert_lora=layout_named(chosen))
