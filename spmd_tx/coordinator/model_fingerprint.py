"""Tells whether two hosts have the same base model, without reading all of its weights."""

from hashlib import blake2b
from pathlib import Path

from spmd_tx.coordinator.model_files import weight_files
from spmd_tx.errors import StartError

CONFIG = "config.json"


def fingerprint(directory: Path) -> dict[str, str]:
    """What the model consists of: a digest of its configuration, and the sizes of its weight files."""
    try:
        found = {CONFIG: blake2b((directory / CONFIG).read_bytes(), digest_size=8).hexdigest()}
        for name in weight_files(directory):
            found[name] = f"{(directory / name).stat().st_size} bytes"
    except OSError as error:
        raise StartError(f"{directory} is no complete model: {error.strerror}: {error.filename}") from None
    return found


def check_same(directory: Path, expected: dict[str, str]) -> None:
    """Raise StartError, which names what differs, unless the directory has the coordinator's model."""
    found = fingerprint(directory)
    for name in sorted(found.keys() | expected.keys()):
        here, there = found.get(name, "absent"), expected.get(name, "absent")
        if here != there:
            raise StartError(
                f"{directory} holds another base model than the coordinator has: {name} is {here} here and "
                f"{there} there; give --base-model the directory of the same model"
            )
