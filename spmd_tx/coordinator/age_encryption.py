"""Encrypts exported files to their recipients with age (age-encryption.org). Blocks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyrage

from spmd_tx.errors import InvalidRequest

SUFFIX = ".age"
MOST_RECIPIENTS = 10  # as in the SDK

_age: Any = pyrage  # its functions have no types
Recipient = Any


def read_recipients(texts: Sequence[str]) -> list[Recipient]:
    """Public keys: age's own, as age1..., or those of SSH. Raises InvalidRequest."""
    if len(texts) > MOST_RECIPIENTS:
        raise InvalidRequest(
            f"age_encryption_recipients has {len(texts)} entries; encrypt to at most {MOST_RECIPIENTS}"
        )
    return [_read(text.strip()) for text in texts]


def encrypt(folder: Path, recipients: Sequence[Recipient]) -> None:
    """Put an encrypted file, with a suffix more, in place of each file. Can go on after an interruption."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix not in (SUFFIX, ".tmp"):
            unfinished = path.with_name(f"{path.name}{SUFFIX}.tmp")
            _age.encrypt_file(str(path), str(unfinished), list(recipients))
            unfinished.rename(path.with_name(path.name + SUFFIX))
            path.unlink()


def _read(text: str) -> Recipient:
    kind = _age.x25519 if text.startswith("age1") else _age.ssh
    try:
        return kind.Recipient.from_str(text)
    except _age.RecipientError as error:
        shown = repr(text if len(text) <= 40 else text[:40] + "...")
        if "SECRET" in text.upper() or "PRIVATE" in text.upper():
            shown = "what looks like a secret key"
        raise InvalidRequest(
            f"age_encryption_recipients has {shown}, which is no public key ({error}); "
            "send keys as age1... or ssh-ed25519 ..."
        ) from None
