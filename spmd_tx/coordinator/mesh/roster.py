"""Keeps track of the agents that have joined: their hosts, whether they are alive, and what they run."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from ipaddress import ip_address

from spmd_tx.coordinator.agent.worker_process import WorkerExit
from spmd_tx.coordinator.mesh.device_shares import DeviceShares
from spmd_tx.coordinator.mesh.hub import Send
from spmd_tx.coordinator.mesh.loss_causes import LossSign, of_agent, of_exit
from spmd_tx.coordinator.mesh.replica_places import ReplicaPlaces
from spmd_tx.coordinator.mesh.watchdog import LONGEST_STEP, SILENT_SECONDS
from spmd_tx.protocol.agents import (
    AgentHello,
    AgentLeaves,
    AgentRefuses,
    AnyAgentReport,
    AnyOrder,
    CountDevices,
    DevicesFound,
    Ping,
    Quit,
    Refused,
    StartWorker,
    StopWorker,
    WorkerEnded,
)
from spmd_tx.protocol.encoding import encode
from spmd_tx.protocol.reports import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

MakeOrder = Callable[[int, list[int] | None], StartWorker]  # of a process and the devices that it takes


@dataclass
class _Agent:
    identity: bytes
    hello: AgentHello
    silent: float = 0.0  # seconds
    runs: int | None = None  # the generation whose worker it has started, and which has not ended
    found: DevicesFound | None = None  # of its host


@dataclass(frozen=True)
class HostDevices:
    """Holds what is known of the devices for one process."""

    host: str
    found: DevicesFound
    wanted: int | None  # as its agent was told; None: as many as there are


@dataclass
class AgentRoster:
    """Knows the present agents of the mesh's processes, and sends them orders."""

    send: Send
    processes: int
    devices: int | None  # of each process; None: not known yet
    on_sign: Callable[[LossSign], None]  # hears when a worker or its agent is gone
    group: str = ""
    shares: DeviceShares = field(default_factory=DeviceShares)  # that groups have beside each other
    _agents: dict[int, _Agent] = field(default_factory=dict)
    _change: asyncio.Event = field(default_factory=asyncio.Event)
    _joins: int = 0  # so far
    _leaving: asyncio.Queue[AgentLeaves] = field(default_factory=asyncio.Queue)

    def take(self, identity: bytes, report: AnyAgentReport) -> None:
        """Process an agent's report."""
        if isinstance(report, AgentHello):
            self._meet(identity, report)
            return
        agent = self._agents.get(report.process)
        if agent is None or agent.identity != identity:
            return
        agent.silent = 0.0
        if isinstance(report, WorkerEnded) and report.generation == agent.runs:
            agent.runs = None
            exit = WorkerExit(report.process, report.code, tuple(report.last_lines), report.is_out_of_memory)
            self.on_sign(of_exit(exit, agent.hello.host))
        elif isinstance(report, DevicesFound):
            agent.found = report
        elif isinstance(report, AgentLeaves):
            logger.info(
                "the agent of %s has to leave within %g s", self.place(report.process), report.seconds
            )
            self._leaving.put_nowait(report)
        elif isinstance(report, AgentRefuses):
            logger.error("the agent of %s has left: %s", self.place(report.process), report.reason)
            self._drop(report.process, f"has left: {report.reason}")
        self._change.set()

    def passed(self, seconds: float) -> None:
        """Add the seconds that have passed, and drop agents that are silent or gone."""
        for process, agent in list(self._agents.items()):
            agent.silent += min(seconds, LONGEST_STEP)
            if agent.silent > SILENT_SECONDS:
                self._drop(process, f"has given no sign of life for {SILENT_SECONDS:g} s")
            elif not self._tell(agent, Ping()):
                self._drop(process, "has lost its connection, or was killed")

    def places(self) -> ReplicaPlaces:
        """Say which agents are absent, and on which hosts the others are."""
        return ReplicaPlaces(self.absent(), {agent.hello.host for agent in self._agents.values()})

    def process_of(self, instance: str) -> int | None:
        """The number of the agent that says so of itself; None: it is not here."""
        return next((each for each, agent in self._agents.items() if agent.hello.instance == instance), None)

    def release(self) -> None:
        """Let agents that were placed here say hello again: others may lack just one."""
        for process, agent in list(self._agents.items()):
            if agent.hello.is_placed:
                reason = f"no agent has joined as worker {', '.join(map(str, self.absent()))} of its replica"
                self._tell(agent, Refused(reason=reason, is_final=False))
                self._drop(process, "looks for another replica")

    @property
    def has_workers(self) -> bool:
        """Whether any started worker still runs."""
        return any(agent.runs is not None for agent in self._agents.values())

    def absent(self) -> list[int]:
        """The processes whose agents are not here."""
        return [process for process in range(self.processes) if process not in self._agents]

    async def changed(self) -> None:
        """Return at the next join, leave or report of an agent."""
        self._change.clear()
        await self._change.wait()

    async def another(self) -> None:
        """Return when an agent joins."""
        joins = self._joins
        while self._joins == joins:
            await self.changed()

    async def count_devices(self) -> list[HostDevices] | None:
        """Ask all agents which devices they have; None: one of them has left before it has answered."""
        for agent in self._agents.values():
            agent.found = None
            self._tell(agent, CountDevices())
        while not self.absent():
            agents = [self._agents[process] for process in range(self.processes)]
            found = [
                HostDevices(agent.hello.host, agent.found, agent.hello.devices)
                for agent in agents
                if agent.found is not None
            ]
            if len(found) == self.processes:
                return found
            await self.changed()
        return None

    def start(self, generation: int, make_order: MakeOrder) -> None:
        """Order all agents to start their workers."""
        for process, agent in self._agents.items():
            agent.runs = generation
            self._tell(agent, make_order(process, self._device_ids(process)))

    async def stop(self, timeout: float) -> None:
        """Order all agents to kill their workers, and wait. An agent that takes longer is dropped."""
        for agent in self._agents.values():
            if agent.runs is not None:
                self._tell(agent, StopWorker(generation=agent.runs))
        if not await self.ended(timeout):
            for process, agent in list(self._agents.items()):
                if agent.runs is not None:
                    self._drop(process, f"has not ended its worker within {timeout:g} s")

    async def ended(self, timeout: float) -> bool:
        """Wait until no worker runs any more; False after ``timeout`` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.has_workers:
                    await self.changed()
        return not self.has_workers

    async def leaving(self) -> AgentLeaves:
        """Return when an agent says that it has to leave."""
        return await self._leaving.get()

    def let_go(self, process: int) -> None:
        """Order an agent to end, and its worker with it, unless it has left."""
        agent = self._agents.get(process)
        if agent is not None:
            self._tell(agent, Quit())
            self._drop(process, "has left, as it had announced", was_announced=True)

    def quit(self) -> None:
        """Order all agents to end."""
        for agent in self._agents.values():
            self._tell(agent, Quit())

    def host(self, process: int) -> str:
        agent = self._agents.get(process)
        return agent.hello.host if agent is not None else "a lost host"

    def place(self, process: int) -> str:
        return f"worker {process} on {self.host(process)}"

    def leader_address(self) -> str:
        """The address of process 0's host for the other processes: loopback, if all are on that host.

        If that host is the coordinator's too, its agent may know a loopback address only; then other agents'
        address of the coordinator is used.
        """
        leader = self._agents[0].hello
        places = {(agent.hello.host, agent.hello.address) for agent in self._agents.values()}
        if len(places) == 1:
            return "127.0.0.1"
        names = [
            agent.hello.coordinator for agent in self._agents.values() if agent.hello.host != leader.host
        ]
        if names and ip_address(leader.address).is_loopback:
            return names[0]
        return leader.address

    def _meet(self, identity: bytes, hello: AgentHello) -> None:
        known = self._agents.get(hello.process)
        refused = self._refusal(hello)
        if known is not None and refused is None:
            if known.hello.instance != hello.instance and self._tell(known, Ping()):
                text = (
                    f"worker {hello.process} has an agent already, on {known.hello.host}; end one of the two"
                )
                refused = Refused(reason=text, is_final=False)
            else:
                self._drop(hello.process, "has lost its connection, or was killed")
        if refused is not None:
            logger.error(
                "refused the agent of worker %d on %s: %s", hello.process, hello.host, refused.reason
            )
            self.send(identity, encode(refused))
            return
        self._agents[hello.process] = _Agent(identity, hello)
        self.shares.expect(hello.host, self.group)
        self._joins += 1
        logger.info("the agent of worker %d on %s has joined", hello.process, hello.host)
        self._change.set()

    def _refusal(self, hello: AgentHello) -> Refused | None:
        problem = None
        if hello.version != PROTOCOL_VERSION:
            problem = (
                f"the agent speaks protocol {hello.version} and the server {PROTOCOL_VERSION}; "
                "install the same version of spmd_tx on all hosts"
            )
        elif not 0 <= hello.process < self.processes:
            problem = (
                f"--process-id is {hello.process}, but the mesh has processes 0 to {self.processes - 1}; "
                "see --num-processes of spmd-tx serve"
            )
        elif self.devices is not None and hello.devices not in (None, self.devices):
            problem = (
                f"--devices is {hello.devices}, but each process of the mesh has {self.devices}; change it, "
                "or the parallel sizes and --num-processes of spmd-tx serve"
            )
        return None if problem is None else Refused(reason=problem, is_final=True)

    def _device_ids(self, process: int) -> list[int] | None:
        """The devices of a process that shares its host with others; None: all visible devices."""
        host = self._agents[process].hello.host
        if self.shares.is_shared(host):
            assert self.devices is not None, "workers are started before it is known on how many devices"
            return self.shares.take(host, (self.group, process), self.devices)
        sharing = sorted(other for other, agent in self._agents.items() if agent.hello.host == host)
        if len(sharing) == 1:
            return None
        assert self.devices is not None, "workers are started before it is known on how many devices"
        first = sharing.index(process) * self.devices
        return list(range(first, first + self.devices))

    def _drop(self, process: int, what: str, *, was_announced: bool = False) -> None:
        """Forget an agent. Its worker is lost, too: a worker dies with its agent, or with the connection."""
        agent = self._agents.pop(process)
        if agent.runs is not None:
            sign = of_agent(process, agent.hello.host, what)
            self.on_sign(replace(sign, was_announced=was_announced))
        self._change.set()

    def _tell(self, agent: _Agent, order: AnyOrder) -> bool:
        return self.send(agent.identity, encode(order))
