"""Names the folders of saved versions. Pure."""

import re
from hashlib import blake2b

MAX_READABLE = 100  # characters


def folder_name(version: str) -> str:
    """The folder name of a version: readable, and unique by a digest."""
    digest = blake2b(version.encode(), digest_size=8).hexdigest()
    return readable(version)[:MAX_READABLE] + "-" + digest


def readable(version: str) -> str:
    """How the folder name of a version begins, and of all whose names begin like it."""
    return re.sub(r"[^\w.-]+", "_", version)
