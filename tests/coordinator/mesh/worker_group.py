"""Everything between the scheduler and the worker processes, with fake workers: agents, port, generations."""

import asyncio
import json
import os
import sys
from contextlib import asynccontextmanager
from pathlib import Path

from spmd_tx.coordinator.agent.agent import Agent, AgentOptions
from spmd_tx.coordinator.agent.base_model import fingerprint
from spmd_tx.coordinator.mesh.generations import GenerationPlan, Generations
from spmd_tx.coordinator.mesh.hub import Hub
from spmd_tx.coordinator.mesh.loss_signs import LossSigns
from spmd_tx.coordinator.mesh.port import WorkerPort
from spmd_tx.coordinator.mesh.reception import Reception
from spmd_tx.coordinator.mesh.roster import AgentRoster
from spmd_tx.protocol.secret import Keys
from tests.support import moves
from tests.support.tiny_setup import tiny_setup

HERE = Path(__file__).parent
FAKE_WORKER = [str(HERE / "fake_worker.py")]
SECRET = "a secret of this test"
SECONDS = 60  # until a test that waits gives up


def write_model(directory: Path, weights: str = "weights") -> Path:
    """What makes two models differ, and nothing else."""
    directory.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (directory / name).write_text("{}")
    (directory / "model.safetensors").write_text(weights)
    return directory


class WorkerGroup:
    """A coordinator without HTTP and log, and its agents."""

    def __init__(
        self,
        model_dir,
        processes=1,
        port=0,
        first_generation=1,
        command_timeout=600.0,
        revision=None,
        name="main",
    ):
        self.model_dir = model_dir
        self.processes = processes
        self.port = WorkerPort("127.0.0.1", port, Keys.of(SECRET))
        self.hub = Hub(self.port.send, on_written=print, on_custom_loss=print)
        signs = LossSigns()
        self.roster = AgentRoster(self.port.send, processes, devices=1, on_sign=signs.add)
        self.counted = first_generation - 1
        setup = tiny_setup(num_processes=processes, model_dir=str(model_dir), fsdp=processes)
        plan = GenerationPlan(
            setup=setup,
            devices=1,
            model_files=fingerprint(model_dir),
            command_timeout=command_timeout,
            next_number=self.count,
            revision=revision,
        )
        self.generations = Generations(self.hub, self.roster, signs, plan)
        reception = Reception(self.port, {name: self.generations})
        self.ready = asyncio.Queue()  # what was said when a generation was ready
        self.tasks = [
            asyncio.create_task(work)
            for work in (
                reception.receive(),
                self.generations.watch(),
                self.generations.run(self.work),
            )
        ]
        self.agents = []

    async def count(self):
        self.counted += 1
        return self.counted

    async def work(self, ready):
        """What a scheduler does that has nothing to do."""
        self.ready.put_nowait(ready)
        await asyncio.Event().wait()

    @property
    def running(self):
        return self.tasks[2]

    def agent(self, process, oom_kills=None, **options):
        """Run an agent in this process; gives its task."""
        fields = {"coordinator": self.port.local_address, "process": process, "secret": SECRET} | options
        self.agents.append(Agent(AgentOptions(**fields), FAKE_WORKER, oom_kills))
        self.tasks.append(asyncio.create_task(self.agents[-1].run()))
        return self.tasks[-1]

    async def until_ready(self):
        async with asyncio.timeout(SECONDS):
            return await self.ready.get()

    async def create(self, seed=0):
        """Send a command; its reply, or a WorkerLost."""
        async with asyncio.timeout(SECONDS):
            return await self.hub.send(moves.create_adapter(seed=seed))

    def worker_pid(self, agent=0):
        return self.agents[agent]._process.pid

    async def close(self):
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.port.close()


@asynccontextmanager
async def worker_group(model_dir, agents=None, **options):
    """A group with agents in this process for all workers, or for those named."""
    group = WorkerGroup(model_dir, **options)
    for process in range(group.processes) if agents is None else agents:
        group.agent(process)
    try:
        yield group
    finally:
        await group.close()


async def agent_process(coordinator, process, **options):
    """An agent like one on another host, in a process of its own."""
    fields = {"coordinator": coordinator, "process": process} | options
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE.parent / "agent" / "agent_with_fake_worker.py"),
        json.dumps(fields),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"SPMD_TX_SECRET": SECRET},
    )
