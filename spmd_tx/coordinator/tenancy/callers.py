"""Who sends a request, and what they may see, as a rule in Python and in SQL. Knows nothing of HTTP."""

from dataclasses import dataclass

from sqlalchemy import ColumnElement, true
from sqlalchemy.orm import InstrumentedAttribute

from spmd_tx.coordinator.storage.tables import LOCAL_OWNER, Role


@dataclass(frozen=True)
class KeyLimits:
    """Holds the limits of one key; None: no limit but the server's."""

    adapters: int | None = None  # the owner's, in open sessions
    queued_requests: int | None = None  # the owner's unfinished sample requests
    queued_tokens: int | None = None  # that those may take: prompts, and max_tokens of all samples
    requests_per_second: float | None = None  # with this key


@dataclass(frozen=True)
class Caller:
    """Identifies the holder of an API key, or anybody on a server without keys."""

    owner: str
    role: Role
    key_id: str | None = None
    limits: KeyLimits = KeyLimits()
    trajectory: str | None = None  # the only one that a key of a trajectory can sample in

    def sees(self, owner: str) -> bool:
        """Whether the caller may see an owner's things. To a caller, unseen things do not exist."""
        return self.role == "admin" or owner == self.owner


EVERYONE = Caller(LOCAL_OWNER, "admin")  # on a server without keys
SERVER = Caller("server", "admin")  # in the audit log, for what the server does by itself


def is_seen(caller: Caller, owner: InstrumentedAttribute[str]) -> ColumnElement[bool]:
    """``Caller.sees`` in SQL."""
    return true() if caller.role == "admin" else owner == caller.owner
