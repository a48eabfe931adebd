"""Finds the base model, and checks that all hosts have the same one. All functions block.

A base model is a directory, or a Hugging Face ID, which is looked up in the local cache and then downloaded.
The Hub's client is imported for an ID only: it takes a tenth of the time of all imports of a server.
"""

import logging
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from spmd_tx.coordinator.agent import layout
from spmd_tx.coordinator.agent.download_news import OnNews
from spmd_tx.coordinator.agent.layout import CONFIG
from spmd_tx.errors import StartError
from spmd_tx.models.checkpoint.index import INDEX_FILE, weight_files

logger = logging.getLogger(__name__)

SAMPLES, SAMPLE_BYTES = 64, 4096  # of each file of weights, for its fingerprint


def find_model(base_model: str, revision: str | None = None, report: OnNews = logger.info) -> Path:
    """The directory of the complete model; ``revision`` is of a Hugging Face ID. Raises StartError.

    ``report`` takes lines that say how far a download is.
    """
    directory = _directory(base_model, revision)
    if directory is not None:
        _check(directory)
        return directory.absolute()
    return _cached(base_model, revision, layout.READ) or _downloaded(base_model, revision, report)


def _cached(model_id: str, revision: str | None, names: Sequence[str]) -> Path | None:
    from spmd_tx.coordinator.agent import hub

    directory = hub.cached(model_id, revision, names)
    return directory if directory is not None and _problem(directory) is None else None


def _downloaded(model_id: str, revision: str | None, report: OnNews) -> Path:
    """Download the model; if that cannot be, a cached one that is complete but for small files will do."""
    from spmd_tx.coordinator.agent import hub

    try:
        directory = hub.download(model_id, revision, report)
    except StartError as error:
        directory = _cached(model_id, revision, ())
        if directory is None:
            raise
        logger.warning("%s; going on with %s, which lacks a file that the model has", error, directory)
    _check(directory)
    return directory


def find_config(base_model: str, revision: str | None = None) -> Path:
    """A directory with the model's config.json; the weights need not be there. Raises StartError."""
    directory = _directory(base_model, revision)
    if directory is not None:
        if not (directory / CONFIG).is_file():
            _check(directory)
        return directory

    from spmd_tx.coordinator.agent import hub

    config = hub.cached(base_model, revision, ())
    if config is None or not (config / CONFIG).is_file():
        config = hub.download_config(base_model, revision)
    return config


def is_directory(base_model: str) -> bool:
    """Whether this is a directory, and not a Hugging Face ID. Raises StartError if it cannot be opened."""
    try:
        return bool(base_model) and Path(base_model).expanduser().is_dir()
    except (OSError, RuntimeError) as error:  # its name is too long, or of a user whom there is not
        reason = getattr(error, "strerror", None) or str(error).rstrip(".")
        raise StartError(
            f"--base-model {base_model} cannot be opened: {reason}; give a directory, or a Hugging Face ID"
        ) from None


def _directory(base_model: str, revision: str | None) -> Path | None:
    """Return the directory; None for a Hugging Face ID. Raises StartError for anything else."""
    if is_directory(base_model):
        if revision is not None:
            raise StartError(
                f"--revision is {revision!r}, but --base-model {base_model} is a directory, which has no "
                "revisions; leave --revision out, or give a Hugging Face ID"
            )
        return Path(base_model).expanduser()
    if revision is not None and not revision.strip():
        raise StartError(f"--revision is {revision!r}; it must be a branch, a tag or a commit")
    if base_model.count("/") != 1 or base_model.startswith((".", "/", "~")):
        raise StartError(
            f"--base-model {base_model or repr('')} is neither a directory nor a Hugging Face ID (owner/name)"
        )
    return None


def fingerprint(directory: Path) -> dict[str, str]:
    """What identifies the model: a digest of its configuration, and size and samples of its weight files."""
    try:
        digests = {CONFIG: blake2b((directory / CONFIG).read_bytes(), digest_size=8).hexdigest()}
        for name in weight_files(directory):
            digests[name] = _fingerprint_of_weights(directory / name)
    except OSError as error:
        raise StartError(f"{directory} is not a complete model: {error.strerror}: {error.filename}") from None
    return digests


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
    digests = fingerprint(directory)
    for name in sorted(digests.keys() | expected.keys()):
        here, there = digests.get(name, "absent"), expected.get(name, "absent")
        if here != there:
            raise StartError(
                f"{directory} holds another base model than the coordinator has: {name} is {here} here and "
                f"{there} there; give --base-model the directory of the same model"
            )


def _check(directory: Path) -> None:
    """Raise StartError, which names the first missing file, unless the model is complete."""
    problem = _problem(directory)
    if problem is not None:
        raise StartError(f"{directory} {problem}")


def _problem(directory: Path) -> str | None:
    try:
        lacking = layout.problem({path.name for path in directory.iterdir() if path.is_file()})
    except OSError as error:
        return f"cannot be read: {error.strerror}; give --base-model a directory that can"
    if lacking is not None:
        return lacking
    for name in weight_files(directory):
        if not (directory / name).is_file():
            return f"has no {name}, which {INDEX_FILE} names; the model's weights are missing or incomplete"
    return None
