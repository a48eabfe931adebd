"""Writes a merged model as a complete Hugging Face checkpoint. No JAX.

Files are written beside their place. One that is there under its own name is whole, so an export that was
interrupted goes on behind the last of them.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from spmd_tx.durable_files import sync, write_file
from spmd_tx.exports.staging import STAGED
from spmd_tx.exports.tensors import ResultTensor
from spmd_tx.models.adapter_formats.files import safetensors_header
from spmd_tx.models.checkpoint.files import INDEX_FILE, SINGLE_FILE, Files

OF_SERVERS = "checkpoint.json"  # which describes a checkpoint to its server
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
BUFFER_BYTES = 1 << 20

OnWrittenBytes = Callable[[int, int], None]  # bytes written, bytes of all


class Content(Protocol):
    """Defines what is asked of the tensors that are written: as tensors.Tensors answers."""

    @property
    def dtype(self) -> str | None: ...

    @property
    def is_encoded(self) -> bool: ...

    def made_of(self, names: Iterable[str]) -> list[ResultTensor]: ...

    def content(self, tensor: ResultTensor) -> Iterator[np.ndarray]: ...


def write_checkpoint(folder: Path, files: Files, tensors: Content, progress: OnWrittenBytes) -> None:
    """Write all files into ``folder``, except those that are there already."""
    plan = _plan(files, tensors)
    total, done = sum(each.size for of_file in plan.values() for each in of_file), 0
    for name, of_file in plan.items():
        if not (folder / name).exists():
            _write_file(folder / name, of_file, tensors, lambda size, done=done: progress(done + size, total))
        done += sum(each.size for each in of_file)
        progress(done, total)
    _write_rest(folder, files.model_dir, plan, tensors, total)


def _plan(files: Files, tensors: Content) -> dict[str, list[ResultTensor]]:
    """Return the tensors of each file of the result; they lie in the base model's files."""
    names: dict[str, list[str]] = defaultdict(list)
    for name in files.names:
        names[files.file_of(name).name].append(name)
    return {file: tensors.made_of(sorted(of_file)) for file, of_file in sorted(names.items())}


def _write_file(
    path: Path, made: list[ResultTensor], tensors: Content, progress: Callable[[int], None]
) -> None:
    beside = path.with_name(path.name + STAGED)
    done = 0
    with beside.open("wb", buffering=BUFFER_BYTES) as file:
        file.write(safetensors_header((each.name, each.dtype, each.shape, each.size) for each in made))
        for tensor in made:
            for piece in tensors.content(tensor):
                file.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
                done += piece.nbytes
                progress(done)
    sync(beside)
    beside.rename(path)


def _write_rest(
    folder: Path, model_dir: Path, plan: dict[str, list[ResultTensor]], tensors: Content, total: int
) -> None:
    """Write the index and config.json, and copy what else the base model has beside its weights."""
    for path in sorted(model_dir.iterdir()):
        is_other = path.name.endswith((*WEIGHTS, ".py")) or path.name.startswith(".")
        if path.is_file() and not is_other and path.name != OF_SERVERS:
            shutil.copyfile(path, folder / path.name)
    if list(plan) != [SINGLE_FILE]:
        weight_map = {each.name: file for file, made in plan.items() for each in made}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_file(folder / INDEX_FILE, (json.dumps(index, indent=2) + "\n").encode())
    config = json.loads((model_dir / "config.json").read_bytes())
    is_untied = any(each.name != each.base and not each.encoding for made in plan.values() for each in made)
    write_file(
        folder / "config.json", (json.dumps(_config(config, tensors, is_untied), indent=2) + "\n").encode()
    )


def _config(config: dict[str, Any], tensors: Content, is_untied: bool) -> dict[str, Any]:
    """Return the base model's config.json as the result needs it, also where it is nested (text_config)."""
    changed = {
        key: _config(value, tensors, is_untied) if isinstance(value, dict) else value
        for key, value in config.items()
    }
    if not tensors.is_encoded:
        changed.pop("quantization_config", None)
    for key in ("dtype", "torch_dtype"):
        if key in changed and tensors.dtype is not None:
            changed[key] = tensors.dtype
    if is_untied and "tie_word_embeddings" in changed:
        changed["tie_word_embeddings"] = False
    return changed
