"""Finds the base model, and checks that all hosts have the same one. All functions block.

A base model is a directory, or a Hugging Face ID, which is looked up in the local cache and then downloaded.
"""

import json
import os
from hashlib import blake2b
from pathlib import Path

from huggingface_hub import snapshot_download

from spmd_tx.errors import StartError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"  # of weights in several files
WHOLE = "model.safetensors"  # weights in one file
CONFIGS = [CONFIG, "generation_config.json"]
TOKENIZER = "tokenizer.json"
SAMPLES, SAMPLE_BYTES = 64, 4096  # of each file of weights, for its fingerprint
DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]  # no other formats of weights


def find_model(base_model: str) -> Path:
    """The directory of the complete model. Raises StartError when there is none."""
    directory = Path(os.path.expanduser(base_model))
    if os.path.isdir(directory):  # False, too, for a name that no directory can have
        _check(directory)
        return directory.absolute()
    if base_model.count("/") != 1 or base_model.startswith((".", "/", "~")):
        raise StartError(
            f"--base-model {base_model} is neither a directory nor a Hugging Face ID (owner/name)"
        )
    return _from_cache(base_model) or _download(base_model)


def find_config(base_model: str) -> Path:
    """A directory with the model's config.json; the weights need not be there. Raises StartError."""
    directory = Path(os.path.expanduser(base_model))
    if os.path.isdir(directory):
        return directory
    for is_local in (True, False):
        try:
            return Path(snapshot_download(base_model, allow_patterns=CONFIGS, local_files_only=is_local))
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
    raise StartError(
        f"--base-model {base_model} is not a directory, and its config.json cannot be downloaded: {reason}. "
        "Check name and network, or give a directory with a config.json"
    )


def weight_files(directory: Path) -> list[str]:
    """The names of the files with the weights, whether they are there or not. Raises StartError."""
    index = directory / INDEX
    if not index.is_file():
        return [WHOLE]
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise StartError(
            f"{index} is damaged: {error!r}; restore it from where the model came from"
        ) from None


def fingerprint(directory: Path) -> dict[str, str]:
    """What identifies the model: a digest of its configuration, and size and samples of its weight files."""
    try:
        found = {CONFIG: blake2b((directory / CONFIG).read_bytes(), digest_size=8).hexdigest()}
        for name in weight_files(directory):
            found[name] = _fingerprint_of_weights(directory / name)
    except OSError as error:
        raise StartError(f"{directory} is not a complete model: {error.strerror}: {error.filename}") from None
    return found


def _fingerprint_of_weights(path: Path) -> str:
    """Read little of a file of any size: the same pieces, evenly spaced, in files of one size."""
    digest, size = blake2b(digest_size=8), path.stat().st_size
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(number * max(size - SAMPLE_BYTES, 0) // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return f"{digest.hexdigest()} of {size} bytes"


def check_same(directory: Path, expected: dict[str, str]) -> None:
    """Raise StartError, which names a difference, unless the directory has the coordinator's model."""
    found = fingerprint(directory)
    for name in sorted(found.keys() | expected.keys()):
        here, there = found.get(name, "absent"), expected.get(name, "absent")
        if here != there:
            raise StartError(
                f"{directory} holds another base model than the coordinator has: {name} is {here} here and "
                f"{there} there; give --base-model the directory of the same model"
            )


def _from_cache(model_id: str) -> Path | None:
    try:
        directory = Path(snapshot_download(model_id, allow_patterns=DOWNLOADED, local_files_only=True))
        _check(directory)
    except (OSError, ValueError, StartError):
        return None  # absent or incomplete
    return directory


def _download(model_id: str) -> Path:
    try:
        directory = Path(snapshot_download(model_id, allow_patterns=DOWNLOADED))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise StartError(
            f"--base-model {model_id} is not a directory, it is not complete in the Hugging Face cache, and "
            f"it cannot be downloaded: {reason}. Check name and network, or give the directory of the model"
        ) from error
    _check(directory)
    return directory


def _check(directory: Path) -> None:
    """Raise StartError, which names the first missing file, unless the model is complete."""
    for name in (CONFIG, TOKENIZER):
        if not (directory / name).is_file():
            raise StartError(f"{directory} has no {name}; a complete model in the Hugging Face layout has it")
    for name in weight_files(directory):
        if not (directory / name).is_file():
            raise StartError(f"{directory} has no {name}; the model's weights are missing or incomplete")
