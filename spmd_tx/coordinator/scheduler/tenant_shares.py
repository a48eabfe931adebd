"""Shares the time for training among tenants, and a tenant's among their sessions. Pure.

A tenant is the owner of API keys. On a server without keys there is one, whose sessions share all of it.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
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
        self._share_out(costs, FairShares.charge)

    def correct(self, costs: Mapping[str, float]) -> None:
        """Charge sessions for seconds that an earlier turn took longer than it was charged for, or less."""
        self._share_out(costs, FairShares.correct)

    def _share_out(
        self, costs: Mapping[str, float], charge: Callable[[FairShares, Mapping[str, float]], None]
    ) -> None:
        """Charge tenants and their sessions, but for those that never trained: they have no share."""
        by_tenant = defaultdict[str, dict[str, float]](dict)
        for session, cost in costs.items():
            if session in self._tenant_of:
                by_tenant[self._tenant_of[session]][session] = cost
        charge(self._tenants, {tenant: sum(parts.values()) for tenant, parts in by_tenant.items()})
        for tenant, parts in by_tenant.items():
            charge(self._of(tenant), parts)

    def _of(self, tenant: str) -> FairShares:
        return self._sessions.setdefault(tenant, FairShares())
