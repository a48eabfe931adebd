"""Hands each report to its group: an agent's by its connection, a worker's by its generation."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import NoReturn

from spmd_tx.config import MAIN
from spmd_tx.coordinator.mesh.generations import Generations
from spmd_tx.coordinator.mesh.port import WorkerPort
from spmd_tx.coordinator.runtime import log_groups
from spmd_tx.protocol.agents import AgentHello, AgentReport, AnyAgentReport, Refused
from spmd_tx.protocol.encoding import encode
from spmd_tx.protocol.reports import AnyReport

logger = logging.getLogger(__name__)

EMPTY: Mapping[str, asyncio.Event] = MappingProxyType({})


class Reception:
    """Is the only reader of the port."""

    def __init__(
        self, port: WorkerPort, groups: Mapping[str, Generations], late: Mapping[str, asyncio.Event] = EMPTY
    ) -> None:
        """``groups`` are by name; agents that name none are those of the main one.

        ``late`` are set when an agent asks for a group that cannot be opened yet.
        """
        self._port = port
        self._groups = dict(groups)
        self._late = late
        self._has_several = len({*groups, *late}) > 1
        self._of_agents: dict[bytes, str] = {}  # groups, by the connections of agents
        self._connections: dict[str, bytes] = {}  # the last one of each agent

    def add(self, name: str, generations: Generations) -> None:
        """Take the agents of a group that could not be opened before."""
        self._groups[name] = generations

    async def receive(self) -> NoReturn:
        """Process the reports of agents and workers."""
        while True:
            identity, report = await self._port.receive()
            if isinstance(report, AgentReport):
                self._take_of_agent(identity, report)
            else:
                self._take_of_worker(identity, report)

    def _take_of_agent(self, identity: bytes, report: AnyAgentReport) -> None:
        if isinstance(report, AgentHello):
            name = report.group or MAIN
            if name not in self._groups:
                self._refuse(identity, report)
                return
            self._of_agents.pop(self._connections.get(report.instance, b""), None)
            self._of_agents[identity], self._connections[report.instance] = name, identity
        name = self._of_agents.get(identity)
        if name is not None:
            with self._entered(name):
                self._groups[name].take_of_agent(identity, report)

    def _take_of_worker(self, identity: bytes, report: AnyReport) -> None:
        """Hand a report over. One of a generation that is over is for the first group to ignore."""
        named = (name for name, group in self._groups.items() if group.includes(report))
        name = next(named, next(iter(self._groups)))
        with self._entered(name):
            self._groups[name].take(identity, report)

    def _entered(self, name: str) -> AbstractContextManager[None]:
        return log_groups.entered(name if self._has_several else None)

    def _refuse(self, identity: bytes, hello: AgentHello) -> None:
        name = hello.group or MAIN
        if name in self._late:
            self._late[name].set()
            reason = f"group {name} cannot be opened yet, and is tried again now; see /healthz of the server"
            self._port.send(identity, encode(Refused(reason=reason, is_final=False)))
            return
        names = ", ".join(self._groups)
        reason = f"there is no group {hello.group}; groups: {names}; correct --group of spmd-tx worker"
        logger.error("refused the agent of %s: %s", hello.host, reason)
        self._port.send(identity, encode(Refused(reason=reason, is_final=True)))
