"""Shares the time for training among tenants, and a tenant's among their sessions. Pure.

A tenant is the owner of API keys. On a server without keys there is one, whose sessions share all of it.
"""

from collections import defaultdict
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from spmd_tx.coordinator.runtime.fair_shares import MOST_AWAY, FairShares
from spmd_tx.coordinator.scheduler.command_seconds import CommandWork

NOBODY: Mapping[str, float] = MappingProxyType({})


class Payer(NamedTuple):
    """Says whose share of the devices' time a command takes."""

    side: str
    sessions: Mapping[str, float] = NOBODY  # the part of each; of training only


class Charge(NamedTuple):
    """Holds what a command was charged for when it was sent."""

    payer: Payer
    work: CommandWork
    seconds: float  # estimated
    sent_at: float
    requests: frozenset[str]


class TenantShares:
    """Counts the seconds that sessions have used."""

    def __init__(self) -> None:
        self._tenants = FairShares()
        self._sessions: dict[str, FairShares] = {}  # by tenant
        self._tenant_of: dict[str, str] = {}  # by session

    def ranking(self, waiting: Mapping[str, str]) -> list[str]:
        """Return the waiting sessions in the order in which to serve them, given the tenant of each."""
        if len(self._tenant_of) > len(waiting) + MOST_AWAY:
            self._tenant_of.clear()
            self._sessions = {
                name: self._sessions[name] for name in waiting.values() if name in self._sessions
            }
        self._tenant_of.update(waiting)
        by_tenant = defaultdict[str, list[str]](list)
        for session, tenant in waiting.items():
            by_tenant[tenant].append(session)
        ranked = list[str]()
        for tenant in self._tenants.ranking(list(by_tenant)):
            ranked += self._of(tenant).ranking(by_tenant[tenant])
        return ranked

    def charge(self, costs: Mapping[str, float]) -> None:
        """Charge sessions for the seconds that they use in a turn."""
        by_tenant = self._by_tenant(costs)
        self._tenants.charge({tenant: sum(parts.values()) for tenant, parts in by_tenant.items()})
        for tenant, parts in by_tenant.items():
            self._of(tenant).charge(parts)

    def correct(self, costs: Mapping[str, float]) -> None:
        """Charge sessions for seconds that an earlier turn took longer than it was charged for, or less."""
        by_tenant = self._by_tenant(costs)
        self._tenants.correct({tenant: sum(parts.values()) for tenant, parts in by_tenant.items()})
        for tenant, parts in by_tenant.items():
            self._of(tenant).correct(parts)

    def _by_tenant(self, costs: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Group costs; sessions that never trained have no share that they could be charged to."""
        by_tenant = defaultdict[str, dict[str, float]](dict)
        for session, cost in costs.items():
            if session in self._tenant_of:
                by_tenant[self._tenant_of[session]][session] = cost
        return by_tenant

    def _of(self, tenant: str) -> FairShares:
        return self._sessions.setdefault(tenant, FairShares())
