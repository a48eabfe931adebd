"""Puts what ``spmd-tx export`` has written into an object store or on the Hugging Face Hub."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from spmd_tx.byte_sizes import show_size
from spmd_tx.errors import StartError
from spmd_tx.exports.staging import check_place, digest

if TYPE_CHECKING:
    from spmd_tx.coordinator.checkpoints.remote_files import RemoteFiles

LAST = ("config.json", "adapter_config.json")  # one of them says that an export is whole
BEGUN = "export.json"  # in an object store while an upload is incomplete: the digests of its files
NAME = "export"


@contextmanager
def open_destination(out: str | None, hub_id: str | None, *, is_private: bool) -> Iterator[Path]:
    """Yield the folder to write, and upload it after the block. Raises StartError.

    Whether there is something to upload to is found out before. The folder of an ``out`` that is not a URL
    stays; otherwise it is a temporary one.
    """
    if out is None and hub_id is None:
        raise StartError("name a place to write to: --out, --push-to-hub, or both")
    uploads = list[Callable[[Path], None]]()
    url = out if out is not None and "://" in out else None
    if url is not None:
        uploads.append(_to_url(url))
    elif out is not None:
        check_place(Path(out))
    if hub_id is not None:
        uploads.append(_to_hub(hub_id, is_private=is_private))
    stays = None if out is None or url is not None else Path(out)
    with nullcontext() if stays else TemporaryDirectory(prefix="spmd-tx-export-") as temporary:
        folder = stays or Path(temporary or "") / NAME
        yield folder
        for upload in uploads:
            upload(folder)


def _to_url(url: str) -> Callable[[Path], None]:
    from spmd_tx.coordinator.checkpoints.remote_files import RemoteFiles

    remote = RemoteFiles(url, "--out")
    try:
        present = remote.sizes()
    except OSError as problem:
        raise StartError(f"--out {url} cannot be read: {problem}") from problem
    if BEGUN not in present and not set(LAST).isdisjoint(present):
        raise StartError(f"{url} holds a model or an adapter already; name another place, or remove it")

    def upload(folder: Path) -> None:
        try:
            _upload(folder, remote)
        except OSError as problem:
            raise StartError(f"cannot write to --out {url}: {problem}") from problem

    return upload


def _upload(folder: Path, remote: "RemoteFiles") -> None:
    """Send all files, except those that an interrupted upload of the same ones has sent already.

    What is sent is noted there before, and the note is removed when all has arrived.
    """
    files = {str(each.relative_to(folder)): each for each in folder.rglob("*") if each.is_file()}
    digests = {name: digest(file) for name, file in files.items()}
    present = remote.sizes()
    noted: dict[str, str] = json.loads(remote.read(BEGUN)) if BEGUN in present else {}
    for name in (*LAST, *noted):  # of another upload
        if name in present and noted.get(name) != digests.get(name):
            remote.delete(name)
            del present[name]
    remote.write(BEGUN, json.dumps(digests).encode())
    total, done = sum(file.stat().st_size for file in files.values()), 0
    for name in sorted(files, key=lambda name: (name in LAST, name)):
        size = files[name].stat().st_size
        if name not in noted or present.get(name) != size:
            remote.upload(files[name], name)
        done += size
        print(f"{show_size(done)} of {show_size(total)} uploaded", file=sys.stderr, flush=True)
    remote.delete(BEGUN)


def _to_hub(repository: str, *, is_private: bool) -> Callable[[Path], None]:
    """Return what pushes a folder in one commit. The Hub asks for no file that it has from an earlier try."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] - of either httpx
    )
    from huggingface_hub.utils import validate_repo_id

    failures = (OSError, ValueError, RuntimeError, HTTPError)
    hub = HfApi(library_name="spmd-tx")
    try:
        validate_repo_id(repository)
    except HFValidationError as problem:
        raise StartError(f"--push-to-hub is {repository!r}: {problem}; name it as OWNER/NAME") from None
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
            raise StartError(
                f"cannot push to {repository}: {_first_line(problem)}; "
                "files that have arrived are not sent again"
            ) from problem

    return upload


def _first_line(problem: BaseException) -> str:
    """Describe a problem by its own first line, and that of its cause."""
    line = (str(problem).strip() or repr(problem)).splitlines()[0]
    return line if problem.__cause__ is None else f"{line} {_first_line(problem.__cause__)}"
