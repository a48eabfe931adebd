"""Encrypts exported files to their recipients with age (age-encryption.org). Blocks.

Call it in a child process only: pyrage is known to panic. The coordinator itself does not import this module.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyrage

from spmd_tx.coordinator.checkpoints.age_recipients import not_a_key
from spmd_tx.errors import InvalidRequest

SUFFIX = ".age"

_age: Any = pyrage  # its functions have no types


def check(recipients: Sequence[str]) -> None:
    """Raise InvalidRequest unless something can be encrypted to all of them: not every number is a key."""
    _age.encrypt(b"", [_read(text) for text in recipients])


def encrypt(folder: str, recipients: Sequence[str]) -> None:
    """Replace each file by an encrypted one with one more suffix. May be interrupted and repeated."""
    keys = [_read(text) for text in recipients]
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file() and path.suffix not in (SUFFIX, ".tmp"):
            unfinished = path.with_name(f"{path.name}{SUFFIX}.tmp")
            _age.encrypt_file(str(path), str(unfinished), keys)
            unfinished.rename(path.with_name(path.name + SUFFIX))
            path.unlink()


def _read(text: str) -> Any:
    """Read a key that check_recipients has let pass. Raises InvalidRequest."""
    kind = _age.x25519 if text.startswith("age1") else _age.ssh
    try:
        return kind.Recipient.from_str(text)
    except _age.RecipientError as error:
        raise InvalidRequest(not_a_key(text, str(error))) from None
