"""Hands each report to its group: an agent's by its connection, a worker's by its generation."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import NoReturn

import msgspec

from spmd_tx.coordinator.mesh.generations import Generations
from spmd_tx.coordinator.mesh.port import WorkerPort
from spmd_tx.coordinator.mesh.replica_places import AgentPlace, place_on
from spmd_tx.coordinator.runtime import log_groups
from spmd_tx.group_names import MAIN, template_of
from spmd_tx.protocol.agents import ANY_PROCESS, AgentHello, AgentReport, AnyAgentReport, Refused
from spmd_tx.protocol.encoding import encode
from spmd_tx.protocol.reports import AnyReport

logger = logging.getLogger(__name__)

EMPTY: Mapping[str, asyncio.Event] = MappingProxyType({})


class Reception:
    """Is the only reader of the port."""

    def __init__(
        self, port: WorkerPort, groups: Mapping[str, Generations], late: Mapping[str, asyncio.Event] = EMPTY
    ) -> None:
        """``groups`` are by name; agents that name none are those of the main one. Replicas are in order.

        ``late`` are set when an agent asks for a group that cannot be opened yet.
        """
        self._port = port
        self._groups = dict(groups)
        self._late = late
        self._has_several = len({*groups, *late}) > 1
        self._of_agents: dict[bytes, AgentPlace] = {}  # by the connections of agents
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
            place = self._place(report)
            if isinstance(place, Refused):
                self._refuse(identity, report, place)
                return
            self._of_agents.pop(self._connections.get(report.instance, b""), None)
            self._of_agents[identity], self._connections[report.instance] = place, identity
            report = msgspec.structs.replace(
                report, group=place.group, is_placed=report.process == ANY_PROCESS
            )
        place = self._of_agents.get(identity)
        if place is not None:
            report = msgspec.structs.replace(report, process=place.process)
            with self._entered(place.group):
                self._groups[place.group].roster.take(identity, report)

    def _take_of_worker(self, identity: bytes, report: AnyReport) -> None:
        """Hand a report over. One of a generation that is over is for the first group to ignore."""
        named = (name for name, group in self._groups.items() if group.hub.includes(report))
        name = next(named, next(iter(self._groups)))
        with self._entered(name):
            self._groups[name].take(identity, report)

    def _entered(self, name: str) -> AbstractContextManager[None]:
        return log_groups.entered(name) if self._has_several else nullcontext()

    def _place(self, hello: AgentHello) -> AgentPlace | Refused:
        """Find the group of an agent, and its number there if it has none."""
        name = hello.group or MAIN
        if name in self._groups:
            if hello.process == ANY_PROCESS:
                return _final(f"group {name} has no replicas; give a worker its number, as --process-id")
            return AgentPlace(name, hello.process)
        late = [each for each in self._late if name in (each, template_of(each))]
        for each in late:
            self._late[each].set()
        replicas = {each: group for each, group in self._groups.items() if template_of(each) == name}
        if not replicas and late:
            reason = f"group {name} cannot be opened yet, and is tried again now; see /healthz of the server"
            return Refused(reason=reason, is_final=False)
        if not replicas:
            names = ", ".join(dict.fromkeys(map(template_of, self._groups)))
            return _final(
                f"there is no group {hello.group}; groups: {names}; correct --group of spmd-tx worker"
            )
        if hello.process != ANY_PROCESS:
            return _final(
                f"group {name} has replicas, which number their workers; leave out --process-id, or name one "
                f"replica, as in --group {next(iter(replicas))}"
            )
        for each, group in replicas.items():
            process = group.roster.process_of(hello.instance)
            if process is not None:
                return AgentPlace(each, process)
        place = place_on(hello.host, {each: group.roster.places() for each, group in replicas.items()})
        reason = f"{name} has its {len(replicas)} replicas; waiting for a place"
        return place or Refused(reason=reason, is_final=False)

    def _refuse(self, identity: bytes, hello: AgentHello, refused: Refused) -> None:
        if refused.is_final:
            logger.error("refused the agent of %s: %s", hello.host, refused.reason)
        self._port.send(identity, encode(refused))


def _final(reason: str) -> Refused:
    return Refused(reason=reason, is_final=True)
