"""Finds models of the Hugging Face Hub in the cache of this machine, and downloads them. All functions block.

Of a repository only those files are downloaded that are read, and those that an export copies.
"""

import glob
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.tqdm import tqdm

from spmd_tx.coordinator.agent import download_news, layout
from spmd_tx.coordinator.agent.download_news import OnNews
from spmd_tx.errors import StartError
from spmd_tx.models.checkpoint.index import INDEX_FILE, SINGLE_FILE, weight_files

UNAUTHORIZED = 401
SIGN_IN = "HF_TOKEN in the environment, or hf auth login"

logging.getLogger("huggingface_hub").handlers.clear()  # what it says is in our log, and once is enough


def cached(model_id: str, revision: str | None, names: Iterable[str]) -> Path | None:
    """The cached snapshot of a revision, unless it is known to lack any of these files that the model has."""
    try:
        folder = snapshot_download(
            model_id, revision=revision, allow_patterns=[layout.CONFIG, *names], local_files_only=True
        )
    except (OSError, ValueError):
        return None
    return Path(folder)


def download_config(model_id: str, revision: str | None) -> Path:
    """Download the configuration alone, and return its directory. Raises StartError."""
    with _explaining(model_id, revision):
        names = HfApi().list_repo_files(model_id, revision=revision)
        if layout.CONFIG not in names:
            raise StartError(f"{_named(model_id, revision)} {layout.problem(names)}")
        return Path(
            snapshot_download(model_id, revision=revision, allow_patterns=[layout.CONFIG], tqdm_class=_NoBar)
        )


def download(model_id: str, revision: str | None, report: OnNews) -> Path:
    """Download what is needed of a model, and return its directory. Raises StartError.

    Weights come last, when it is known that nothing else is missing.
    """
    report(f"asking {constants.ENDPOINT} for {model_id}")
    with _explaining(model_id, revision):
        tree = HfApi().list_repo_tree(model_id, recursive=True, revision=revision)
        names = {file.path: file.size for file in tree if isinstance(file, RepoFile)}
        lacking = layout.problem(names)
        if lacking is not None:
            raise StartError(f"{_named(model_id, revision)} {lacking}")
        small = {name: names[name] for name in layout.beside_weights(names)}
        directory = _fetched(model_id, revision, small, report)
        weights = [SINGLE_FILE] if SINGLE_FILE in names else weight_files(directory)
        absent = sorted(set(weights) - set(names))
        if absent:
            raise StartError(
                f"{_named(model_id, revision)} has no {absent[0]}, which its {INDEX_FILE} names; take "
                "another --revision, or another copy of the model"
            )
        return _fetched(model_id, directory.name, {name: names[name] for name in weights}, report)


def _fetched(model_id: str, revision: str | None, sizes: Mapping[str, int], report: OnNews) -> Path:
    """Download files, of which the bytes are given, and return their directory."""
    patterns = [glob.escape(name) for name in sizes]
    blobs = Path(constants.HF_HUB_CACHE) / f"models--{model_id.replace('/', '--')}" / "blobs"
    missing = sum(size for name, size in sizes.items() if not _is_cached(model_id, revision, name))
    with download_news.told(model_id, blobs, missing, report):
        return Path(
            snapshot_download(model_id, revision=revision, allow_patterns=patterns, tqdm_class=_NoBar)
        )


def _is_cached(model_id: str, revision: str | None, name: str) -> bool:
    return isinstance(try_to_load_from_cache(model_id, name, revision=revision), str)


class _NoBar(tqdm):
    """Draws nothing: a bar is made for a terminal, and off one it tells of whole files only."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options | {"disable": True})


def _named(model_id: str, revision: str | None) -> str:
    return f"--base-model {model_id}" + ("" if revision is None else f" at --revision {revision}")


@contextmanager
def _explaining(model_id: str, revision: str | None) -> Iterator[None]:
    """Say why a model cannot be downloaded, and what helps."""
    try:
        yield
    except StartError:
        raise
    except Exception as error:  # what the libraries below raise has no common type
        reason, remedy = _explained(model_id, revision, error)
        raise StartError(
            f"{_named(model_id, revision)} is not a directory, it is not complete in the Hugging Face cache, "
            f"and it cannot be downloaded: {reason}; {remedy}"
        ) from error


def _explained(model_id: str, revision: str | None, error: Exception) -> tuple[str, str]:
    place = constants.ENDPOINT
    if not isinstance(error, HFValidationError) and constants.HF_HUB_OFFLINE:
        return (
            f"HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} lacks files of it",
            "download it once without that variable, or give the directory of the model",
        )
    match error:
        case GatedRepoError():
            return (
                f"{place}/{model_id} is gated",
                f"accept its terms there, and give a token of that account ({SIGN_IN})",
            )
        case RevisionNotFoundError():
            return (
                f"it has no branch, tag or commit {revision!r}",
                f"{place}/{model_id}/commits/main lists what it has; without --revision, main is taken",
            )
        case RepositoryNotFoundError():
            return (
                f"{place} has no such repository, or it is private",
                f"check the name, and if it is private give a token that may read it ({SIGN_IN})",
            )
        case HfHubHTTPError() if error.response.status_code == UNAUTHORIZED:
            return f"{place} refuses the token", f"give one that is valid ({SIGN_IN}), or none"
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"{reason:.500}", "check name and network, or give the directory of the model"
