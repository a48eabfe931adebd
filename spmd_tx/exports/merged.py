"""Merges an adapter into its base model, or writes a model all of whose weights were trained. No JAX."""

from collections.abc import Mapping
from pathlib import Path

from spmd_tx.errors import StartError
from spmd_tx.exports.adapter import AdapterFolder, layout_of
from spmd_tx.exports.checkpoint import OnWrittenBytes, write_checkpoint
from spmd_tx.exports.merge import Merge
from spmd_tx.exports.staging import identity, staged
from spmd_tx.exports.tensors import ResultTensors
from spmd_tx.models.checkpoint.copies import check_copies
from spmd_tx.models.checkpoint.files import Files
from spmd_tx.models.config import read_model_config


def export_merged(
    adapter: Path,
    model_dir: Path,
    out: Path,
    dtype: str | None,
    progress: OnWrittenBytes = lambda done, total: None,
) -> None:
    """Write the base model in ``model_dir`` with the adapter to the new folder ``out``. Raises StartError.

    ``dtype`` is one of ``tensors.FLOATS``; None keeps the base model's types and encodings.
    """
    model = read_model_config(model_dir, layout_of(adapter))
    files = Files(model_dir)
    check_copies(files, model.unread)
    merge = Merge(AdapterFolder(adapter, model), model)
    _check(merge, files)
    exported = identity(adapter, base_model=str(model_dir.resolve()), dtype=str(dtype))
    with staged(out, exported) as folder:
        write_checkpoint(folder, files, ResultTensors(files, model, merge, dtype), progress)


def export_whole(
    model_dir: Path,
    out: Path,
    dtype: str | None,
    fingerprint: Mapping[str, str],
    progress: OnWrittenBytes = lambda done, total: None,
) -> None:
    """Write a complete model, which needs no adapter, to the new folder ``out``. Raises StartError.

    ``fingerprint`` identifies the files of the model; ``dtype`` is as for export_merged.
    """
    files, exported = Files(model_dir), {**fingerprint, "dtype": str(dtype)}
    with staged(out, exported) as folder:
        tensors = ResultTensors(files, read_model_config(model_dir), None, dtype)
        write_checkpoint(folder, files, tensors, progress)


def _check(merge: Merge, files: Files) -> None:
    """Raise StartError unless the base model has the tensors that change; encoded ones have other names."""
    for name, change in merge.changes.items():
        if not any(each.startswith(change.copied_from or name) for each in files.names):
            raise StartError(
                f"{files.model_dir} has no tensor {name}, which the adapter changes; is it of another model?"
            )
