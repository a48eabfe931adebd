"""Who sends a request, and what they may see, as a rule in Python and in SQL. Knows no HTTP."""

from dataclasses import dataclass

from sqlalchemy import ColumnElement, true
from sqlalchemy.orm import InstrumentedAttribute

from spmd_tx.coordinator.storage.tables import LOCAL_OWNER, Role


@dataclass(frozen=True)
class KeyLimits:
    """Of one key; None: as much as the server can do."""

    adapters: int | None = None  # of the owner, in sessions that are open
    queued_requests: int | None = None  # sample requests of the owner that are not finished
    queued_tokens: int | None = None  # that those may take: prompts, and max_tokens of all samples
    requests_per_second: float | None = None  # with this key


@dataclass(frozen=True)
class Caller:
    """The holder of an API key, or whoever reaches a server without keys."""

    owner: str
    role: Role
    key_id: str | None = None
    limits: KeyLimits = KeyLimits()

    def sees(self, owner: str) -> bool:
        """The rule of ownership: what is not seen does not exist (access.py)."""
        return self.role == "admin" or owner == self.owner


EVERYONE = Caller(LOCAL_OWNER, "admin")  # on a server without keys
SERVER = Caller("server", "admin")  # what it does by itself, in the audit log


def is_seen(caller: Caller, owner: InstrumentedAttribute[str]) -> ColumnElement[bool]:
    """Caller.sees in SQL."""
    return true() if caller.role == "admin" else owner == caller.owner
