"""What sampling hands to the scheduler: one command to send, its cost, and how its reply ends requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spmd_tx.protocol import AnyCommand, Reply

if TYPE_CHECKING:
    from spmd_tx.coordinator.request_queue import Outcome

# One frozen set of weights to sample from: a sampler id for an ephemeral version, the checkpoint's
# tinker:// path for a named one, BASE_MODEL for the base model itself.
VersionKey = str
BASE_MODEL: VersionKey = "base"


@dataclass(frozen=True)
class Dispatch:
    """A command that is ready to be sent."""

    command: AnyCommand
    tokens: int  # what it costs, for fair shares
    absorb: Callable[[Reply], list[tuple[str, Outcome]]]  # finished requests: (request_id, outcome)
