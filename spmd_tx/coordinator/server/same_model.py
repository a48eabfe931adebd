"""Keeps a data directory to one base model, whose adapters fit no other one, and to its numbers."""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.server.base_records import (
    FILE,
    BaseRecord,
    ModelRecord,
    read_record,
    write_record,
)
from spmd_tx.errors import StartError
from spmd_tx.models.declared.model import Model

logger = logging.getLogger(__name__)

SIZES = ("n_layers", "d_model", "d_ff", "n_heads", "n_kv_heads", "head_dim", "n_experts", "vocab_size")


@dataclass(frozen=True)
class NumericChanges:
    """Says what decides the numbers of a model and is not as it was at the last start."""

    config: ServerConfig
    record: BaseRecord  # what this start has
    changes: tuple[str, ...] = ()
    is_of_one_kind: bool = True  # whether it is known to be of adapters, or of whole models

    def settle(self, steps: int, ranks: Collection[int]) -> None:
        """Record what this start has; ``ranks`` are those of all models before it. Blocks.

        Raises StartError if ``steps`` of training would be run again with other numbers, since their results
        are known to clients already.
        """
        if not self.is_of_one_kind and ranks:
            _check_kind(self.config.data_dir, not any(ranks), self.config.full_parameters)
        if self.changes and steps:
            raise StartError(
                f"{'; '.join(self.changes)}; but {steps} training requests since the last snapshots would be "
                "run again, with other results than clients got. Start the server as before, and end it with "
                'SIGTERM, which takes a snapshot of every model that has no gradient; or remove "model" from '
                f"{self.config.data_dir / FILE} to run them again anyway"
            )
        for change in self.changes:
            logger.warning("%s: models continue, but with other numbers, so their losses change", change)
        write_record(self.config, self.record)


def check_same_model(config: ServerConfig, model: Model, files: dict[str, str]) -> NumericChanges:
    """Raise StartError if the data directory belongs to a base model of another shape. Blocks.

    It belongs to adapters or to whole models, too. ``files`` are fingerprints of the base model's. A new data
    directory is from now on this model's.
    """
    record = read_record(config)
    known, present = record.model, _present(config, model, files)
    record.model = present
    if known is None:
        write_record(config, record)
        return NumericChanges(config, record)
    _check_shape(config, known, present)
    if known.trains_all_weights is not None:
        _check_kind(config.data_dir, known.trains_all_weights, config.full_parameters)
    present.base_model = known.base_model
    changes = tuple(_changes(config, known, present))
    return NumericChanges(config, record, changes, known.trains_all_weights is not None)


def _present(config: ServerConfig, model: Model, files: dict[str, str]) -> ModelRecord:
    """Return what this start has."""
    return ModelRecord(
        base_model=config.base_model,
        revision=config.revision,
        architecture=model.architecture,
        sizes={name: getattr(model, name) for name in SIZES},
        trains_all_weights=config.full_parameters,
        base_dtype=config.base_dtype,
        dtype=config.dtype,
        files=files,
    )


def _check_shape(config: ServerConfig, known: ModelRecord, present: ModelRecord) -> None:
    differences = [
        f"{name} is {now} and was {before}"
        for name, now, before in (
            ("the architecture", present.architecture, known.architecture),
            *((name, present.sizes[name], known.sizes.get(name)) for name in SIZES),
        )
        if now != before
    ]
    if differences:
        raise StartError(
            f"--base-model {config.base_model} is another model than {known.base_model}, whose adapters are "
            f"in {config.data_dir}: {', '.join(differences)}; give --base-model that one, or set another "
            "--data-dir"
        )


def _check_kind(data_dir: Path, trained_all: bool, trains_all: bool) -> None:
    if trained_all != trains_all:
        before, now = ("all weights", "without") if trained_all else ("adapters", "with")
        raise StartError(
            f"{data_dir} is of a server that trains {before}, and this one is {now} --full-parameters; start "
            "it as before, or set another --data-dir"
        )


def _revisions(known: ModelRecord, present: ModelRecord) -> str:
    if known.revision == present.revision:
        return ""
    before, now = ("left out" if each.revision is None else each.revision for each in (known, present))
    return f" (--revision was {before} and is {now} now)"


def _changes(config: ServerConfig, known: ModelRecord, present: ModelRecord) -> list[str]:
    changes = [
        f"{option} was {before} at the last start and is {now} now"
        for option, before, now in (
            ("--base-dtype", known.base_dtype, present.base_dtype),
            ("--dtype", known.dtype, present.dtype),
        )
        if before != now
    ]
    if known.files is not None and present.files is not None and known.files != present.files:
        names = known.files.keys() | present.files.keys()
        other = sorted(name for name in names if known.files.get(name) != present.files.get(name))
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        changes.append(
            f"--base-model {config.base_model} has other weights or another configuration than at the last "
            f"start, in {other[0]}{more}{_revisions(known, present)}"
        )
    return changes
