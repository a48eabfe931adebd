"""Finds the adapter or model that ``spmd-tx export`` writes: in a folder, or among a server's checkpoints."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer

from spmd_tx.errors import InvalidRequest, StartError

if TYPE_CHECKING:
    from spmd_tx.coordinator.checkpoints.files import Manifest
    from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath

SCHEME = "tinker://"
MOST_CACHE_BYTES = 1 << 62  # one checkpoint is fetched, however large it is

tell = partial(typer.echo, err=True)  # how far it is


@dataclass(frozen=True)
class NamedBase:
    """Names the base model as the command line does."""

    name: str | None = None  # None: as the checkpoint says
    revision: str | None = None  # None: main


@contextmanager
def open_adapter(
    adapter: str, data_dir: Path, checkpoints_base: str | None, base: NamedBase
) -> Iterator[Path]:
    """Yield a PEFT folder of an adapter, which is a folder or a tinker:// path. Raises StartError.

    Of a model all of whose weights were trained it is the complete model. No server has to run, nor must it
    be stopped. Training checkpoints are converted for the moment.
    """
    from spmd_tx.coordinator.checkpoints.files import read_manifest
    from spmd_tx.models.adapter_formats.files import CONFIG_FILE

    with TemporaryDirectory(prefix="spmd-tx-export-") as temporary:
        folder = Path(adapter)
        if adapter.startswith(SCHEME):
            folder = _fetch(adapter, data_dir, checkpoints_base, Path(temporary) / "fetched")
        manifest = read_manifest(folder)
        if manifest is not None and manifest.is_encrypted:
            raise StartError(
                f"the files of {adapter} are encrypted to the keys that its save named; decrypt them into a "
                "folder (age --decrypt), and export that one"
            )
        if manifest is None or (folder / CONFIG_FILE).exists() or is_whole(folder):
            yield folder
            return
        convert = _converted if manifest.rank else _converted_model
        if not adapter.startswith(SCHEME):
            _verify(folder, manifest)
        try:
            converted = convert(folder, manifest, Path(temporary) / "converted", base)
        except OSError as problem:
            raise StartError(
                f"cannot convert {adapter} in {temporary}: {problem}; set TMPDIR to a disk with more room"
            ) from problem
        yield converted


def is_whole(folder: Path) -> bool:
    """Whether this is the folder of a complete model, and not of an adapter."""
    from spmd_tx.coordinator.agent.layout import CONFIG
    from spmd_tx.models.adapter_formats.files import CONFIG_FILE

    return (folder / CONFIG).exists() and not (folder / CONFIG_FILE).exists()


def _verify(folder: Path, manifest: "Manifest") -> None:
    """Compare the files of a training checkpoint with their digests. Raises StartError."""
    from spmd_tx.coordinator.checkpoints.files import verify
    from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath

    try:
        verify(CheckpointPath(manifest.run_id, folder.parent.name, folder.name), folder)
    except InvalidRequest as problem:
        raise StartError(f"cannot export {folder}: {problem}") from problem


def _fetch(adapter: str, data_dir: Path, checkpoints_base: str | None, cache: Path) -> Path:
    """Return the folder of a named checkpoint, whose files were compared with their digests."""
    from spmd_tx.config import ServerConfig
    from spmd_tx.coordinator.checkpoints.remote_files import RemoteFiles
    from spmd_tx.coordinator.checkpoints.remote_store import CheckpointCache, RemoteStore
    from spmd_tx.coordinator.checkpoints.store import LocalStore
    from spmd_tx.coordinator.wire.checkpoint_paths import parse

    config = ServerConfig(base_model="", data_dir=data_dir, checkpoints_base=checkpoints_base)
    place = str(config.checkpoints_dir)
    if checkpoints_base is not None and "://" in checkpoints_base:
        place = checkpoints_base
        store = RemoteStore(RemoteFiles(checkpoints_base), CheckpointCache(cache, MOST_CACHE_BYTES))
    else:
        store = LocalStore(config.checkpoints_dir)
    try:
        path = parse(adapter)
        manifest = store.manifest(path)
        if manifest is None or manifest.run_id != path.run_id:  # folders spell the IDs of runs without colons
            path = _only(store.beginning_so(path), adapter, place)
        return store.fetch(path).folder
    except (InvalidRequest, OSError) as problem:
        raise StartError(f"cannot export {adapter}: {problem}") from problem


def _only(found: Sequence["CheckpointPath"], adapter: str, place: str) -> "CheckpointPath":
    if not found:
        raise StartError(
            f"there is no checkpoint {adapter} in {place}; name the server's --data-dir, and its "
            "--checkpoints-base if it has one"
        )
    if len(found) > 1:
        raise StartError(f"{found[0]} and {found[1]} are both meant by {adapter}; give more of the run's ID")
    return found[0]


def _converted(folder: Path, manifest: "Manifest", place: Path, base: NamedBase) -> Path:
    from spmd_tx.coordinator.agent.base_model import find_config
    from spmd_tx.models.config import read_model_config
    from spmd_tx.worker.storage.state_to_peft import write_peft

    layout = "shared-outer" if manifest.expert_lora == "shared-outer" else "per-expert"
    model = read_model_config(find_config(base.name or manifest.base_model, base.revision), layout)
    write_peft(folder, place, manifest.adapter, model, manifest.base_model)
    return place


def _converted_model(folder: Path, manifest: "Manifest", place: Path, base: NamedBase) -> Path:
    from spmd_tx.coordinator.agent.base_model import find_model
    from spmd_tx.worker.storage.state_to_model import write_model_of_state

    write_model_of_state(folder, place, find_model(base.name or manifest.base_model, base.revision, tell))
    return place
