"""An agent: starts and ends one worker process as the coordinator says, and survives both of them."""

import asyncio
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spmd_tx.coordinator.agent.base_model import check_same, find_model
from spmd_tx.coordinator.agent.link import AgentLink, Connected, LinkEvent, Lost, Rejected, local_address
from spmd_tx.coordinator.agent.oom_kills import OomKills
from spmd_tx.coordinator.agent.worker_process import WorkerExit, WorkerProcess
from spmd_tx.environments import of_worker
from spmd_tx.errors import StartError
from spmd_tx.protocol.agents import (
    AgentBeat,
    AgentHello,
    AgentRefuses,
    Ping,
    Quit,
    Refused,
    StartWorker,
    StopWorker,
    WorkerEnded,
)
from spmd_tx.protocol.reports import BEAT_SECONDS
from spmd_tx.protocol.secret import VARIABLE, Keys

logger = logging.getLogger(__name__)

WORKER = ("-m", "spmd_tx.worker.main")
REJECTED_SECONDS = 10.0  # of nothing but refused connections, until the agent gives up
AGAIN_SECONDS = 2.0  # after a refusal that may pass


@dataclass(frozen=True)
class AgentOptions:
    """What an agent is told by whoever starts it."""

    coordinator: str  # HOST:PORT
    process: int
    secret: str
    devices: int | None = None  # of its worker; None: as many as the mesh asks for
    base_model: str | None = None  # where this host has it; None: where the coordinator has it
    patience: float | None = None  # seconds without a coordinator until it gives up; None: never


class Agent:
    """The agent of one worker process."""

    def __init__(
        self, options: AgentOptions, worker: Sequence[str] = WORKER, oom_kills: OomKills | None = None
    ) -> None:
        self._options = options
        self._worker = worker
        self._instance = secrets.token_hex(8)
        self._supervisor = WorkerProcess(options.process)
        self._oom_kills = oom_kills or OomKills()
        self._has_met = False  # a coordinator, ever
        self._alone_since: float | None = None
        self._rejected_since: float | None = None

    async def run(self) -> None:
        """Return when the coordinator says that it ends. Raises StartError when it cannot be of use."""
        self._link = AgentLink(self._options.coordinator, Keys.of(self._options.secret))
        self._alone_since = self._now()
        beating = asyncio.create_task(self._beat())
        try:
            while not isinstance(event := await self._next(), Quit):
                await self._act(event)
        except StartError as error:
            self._link.send(AgentRefuses(process=self._options.process, reason=str(error)))
            raise
        finally:
            beating.cancel()
            self._supervisor.kill()
            await self._supervisor.stop(patience=0)
            await self._link.close()

    def kill(self) -> None:
        """End the worker at once."""
        self._supervisor.kill()

    async def _next(self) -> LinkEvent:
        """Raises StartError when there has been no coordinator for too long."""
        deadline = None
        if self._alone_since is not None and self._options.patience is not None:
            deadline = self._alone_since + self._options.patience
        try:
            async with asyncio.timeout_at(deadline):
                return await self._link.next()
        except TimeoutError:
            raise StartError(
                f"no coordinator at {self._options.coordinator} for {self._options.patience:g} s; start it, "
                "or check --coordinator, which is the address and --worker-port of spmd-tx serve"
            ) from None

    async def _act(self, event: LinkEvent) -> None:
        match event:
            case Connected():
                self._alone_since = self._rejected_since = None
                self._has_met = True
                logger.info("found the coordinator at %s", self._options.coordinator)
                self._say_hello()
            case Lost():
                self._alone_since = self._now()
                logger.warning("lost the coordinator at %s", self._options.coordinator)
                await self._supervisor.stop(patience=0)
            case Rejected():
                self._be_rejected()
            case StartWorker():
                await self._start(event)
            case StopWorker():
                await self._stop(event.generation)
            case Refused(reason=reason, is_final=is_final):
                if is_final:
                    raise StartError(reason)
                logger.warning("%s", reason)
                asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._say_hello)
            case Ping() | Quit():
                pass

    def _say_hello(self) -> None:
        self._link.send(
            AgentHello(
                process=self._options.process,
                instance=self._instance,
                host=socket.gethostname(),
                address=local_address(self._options.coordinator),
                coordinator=self._options.coordinator.rpartition(":")[0],
                devices=self._options.devices,
            )
        )

    def _be_rejected(self) -> None:
        """Give up, if this goes on from the start; later it may be a coordinator that is being replaced."""
        self._rejected_since = self._rejected_since or self._now()
        if not self._has_met and self._now() - self._rejected_since >= REJECTED_SECONDS:
            raise StartError(
                f"the coordinator at {self._options.coordinator} refuses the connection: the secrets differ, "
                "or that is not its --worker-port; give all hosts the same --secret-file"
            )

    async def _start(self, order: StartWorker) -> None:
        await self._supervisor.stop(patience=0)
        base_model = self._options.base_model
        directory = await asyncio.to_thread(find_model, base_model) if base_model else Path(order.model_dir)
        await asyncio.to_thread(check_same, directory, order.model_files)
        command = [
            sys.executable,
            *self._worker,
            *("--coordinator", f"tcp://{self._options.coordinator}"),
            *("--process-id", str(self._options.process)),
            *("--generation", str(order.generation)),
            *("--devices", str(order.devices)),
            *("--model-dir", str(directory)),
        ]
        if order.device_ids is not None and not _sees_only(order.devices):
            command += ["--device-ids", ",".join(map(str, order.device_ids))]
        logger.info("generation %d: starting worker %d", order.generation, self._options.process)
        try:
            environment = of_worker(os.environ) | {VARIABLE: self._options.secret}
            ended = await self._supervisor.start(command, environment)
        except OSError as error:  # too many processes, or no memory for one more
            self._report_end(order.generation, WorkerExit(self._options.process, 1, (str(error),)))
            return
        ended.add_done_callback(lambda ended: self._report_end(order.generation, ended.result()))

    async def _stop(self, generation: int) -> None:
        if self._supervisor.is_running:
            await self._supervisor.stop(patience=0)
        else:
            self._report_end(generation, WorkerExit(self._options.process, 0))

    def _report_end(self, generation: int, exit: WorkerExit) -> None:
        self._link.send(
            WorkerEnded(
                process=exit.worker,
                generation=generation,
                code=exit.code,
                last_lines=list(exit.last_lines),
                is_out_of_memory=exit.code == -signal.SIGKILL and self._oom_kills.were_recent(),
            )
        )

    async def _beat(self) -> None:
        while True:
            self._link.send(AgentBeat(process=self._options.process))
            self._oom_kills.note()
            await asyncio.sleep(BEAT_SECONDS)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _sees_only(devices: int) -> bool:
    """Whether a launcher has divided this host's GPUs already."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return len([each for each in visible.split(",") if each]) == devices
