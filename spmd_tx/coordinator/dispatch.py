"""What sampling hands to the scheduler: one command to send, its cost, and how its reply ends requests."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from spmd_tx.protocol import AnyCommand
from spmd_tx.reports import Reply

if TYPE_CHECKING:
    from spmd_tx.coordinator.request_queue import Outcome

# One frozen set of weights to sample from: a sampler id for an ephemeral version, the checkpoint's
# tinker:// path for a named one, BASE_MODEL for the base model itself.
VersionKey = str
BASE_MODEL: VersionKey = "base"


LONGEST_READABLE = 100  # characters


def folder_name(version: VersionKey) -> str:
    """What the folder of a version is called: readable, and unlike that of any other version."""
    digest = blake2b(version.encode(), digest_size=8).hexdigest()
    return re.sub(r"[^\w.-]+", "_", version)[:LONGEST_READABLE] + "-" + digest


@dataclass(frozen=True)
class Dispatch:
    """A command that is ready to be sent."""

    command: AnyCommand
    tokens: int  # what it costs, for fair shares
    absorb: Callable[[Reply], list[tuple[str, Outcome]]]  # finished requests: (request_id, outcome)
    requests: frozenset[str] = frozenset()  # whose samples it works on
