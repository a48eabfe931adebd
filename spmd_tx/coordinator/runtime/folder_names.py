"""What the folder of a saved version is called. Pure."""

import re
from hashlib import blake2b

LONGEST_READABLE = 100  # characters


def folder_name(version: str) -> str:
    """What the folder of a version is called: readable, and unlike that of any other version."""
    digest = blake2b(version.encode(), digest_size=8).hexdigest()
    return re.sub(r"[^\w.-]+", "_", version)[:LONGEST_READABLE] + "-" + digest
