"""Puts what ``spmd-tx export`` has written into an object store or on the Hugging Face Hub."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from spmd_tx.errors import StartError

LAST = ("config.json", "adapter_config.json")  # one of them says that an export is whole
NAME = "export"


@contextmanager
def open_destination(out: str | None, hub_id: str | None, *, is_private: bool) -> Iterator[Path]:
    """Yield the folder to write, and upload it after the block. Raises StartError.

    Whether there is something to upload to is found out before. The folder of an ``out`` that is not a URL
    stays; otherwise it is a temporary one.
    """
    if out is None and hub_id is None:
        raise StartError("name a place to write to: --out, --push-to-hub, or both")
    upload: list[Callable[[Path], None]] = []
    is_url = out is not None and "://" in out
    if out is not None and is_url:
        upload.append(_to_url(out))
    if hub_id is not None:
        upload.append(_to_hub(hub_id, is_private=is_private))
    if out is not None and not is_url:
        yield Path(out)
        _upload_all(upload, Path(out))
        return
    with TemporaryDirectory(prefix="spmd-tx-export-") as temporary:
        folder = Path(temporary) / NAME
        yield folder
        _upload_all(upload, folder)


def _upload_all(uploads: list[Callable[[Path], None]], folder: Path) -> None:
    for upload in uploads:
        upload(folder)


def _to_url(url: str) -> Callable[[Path], None]:
    from spmd_tx.coordinator.checkpoints.remote_files import RemoteFiles

    remote = RemoteFiles(url, "--out")
    try:
        present = set(remote.list(""))
    except OSError as problem:
        raise StartError(f"--out {url} cannot be read: {problem}") from problem
    if present & set(LAST):
        raise StartError(f"{url} holds a model or an adapter already; name another place, or remove it")

    def upload(folder: Path) -> None:
        names = [str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()]
        try:
            for name in sorted(names, key=lambda name: (name in LAST, name)):
                remote.upload(folder / name, name)
        except OSError as problem:
            raise StartError(f"cannot write to --out {url}: {problem}") from problem

    return upload


def _to_hub(repository: str, *, is_private: bool) -> Callable[[Path], None]:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError  # pyright: ignore[reportPrivateImportUsage] - of either httpx

    failures = (OSError, ValueError, RuntimeError, HTTPError)
    hub = HfApi(library_name="spmd-tx")
    try:
        hub.whoami()
    except failures as problem:
        raise StartError(
            f"cannot push to {repository}: {_first_line(problem)}; set HF_TOKEN to a token that may write, "
            "or run hf auth login"
        ) from problem

    def upload(folder: Path) -> None:
        try:
            hub.create_repo(repository, private=is_private, exist_ok=True)
            hub.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload with spmd-tx")
        except failures as problem:
            raise StartError(f"cannot push to {repository}: {_first_line(problem)}") from problem

    return upload


def _first_line(problem: Exception) -> str:
    return (str(problem).strip() or repr(problem)).splitlines()[0]
