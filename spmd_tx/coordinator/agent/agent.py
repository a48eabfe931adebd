"""An agent: starts and ends one worker process on the coordinator's orders, and outlives both."""

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

from msgspec.structs import asdict

from spmd_tx.coordinator.agent.base_model import check_same, find_model, is_directory
from spmd_tx.coordinator.agent.devices import count_devices, restriction
from spmd_tx.coordinator.agent.link import AgentLink, LinkChange, LinkEvent, local_address
from spmd_tx.coordinator.agent.oom_kills import OomKills
from spmd_tx.coordinator.agent.worker_process import WorkerExit, WorkerProcess
from spmd_tx.errors import StartError
from spmd_tx.processes.environments import of_worker
from spmd_tx.protocol import addresses
from spmd_tx.protocol.agents import (
    AgentBeat,
    AgentHello,
    AgentLeaves,
    AgentRefuses,
    CountDevices,
    DevicesFound,
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
REJECTED_SECONDS = 10.0  # of refused connections only, after which the agent gives up
RETRY_SECONDS = 2.0  # after a refusal that may pass


@dataclass(frozen=True)
class AgentOptions:
    """Holds the options of one agent."""

    coordinator: str  # HOST:PORT
    process: int  # or ANY_PROCESS: the coordinator gives it one
    secret: str
    devices: int | None = None  # of its worker; None: as many as the mesh asks for
    base_model: str | None = None  # its place on this host; None: the same place as on the coordinator's
    group: str = ""  # whose worker it is; empty: the first one's
    patience: float | None = None  # seconds without a coordinator until it gives up; None: never
    leave_seconds: float = 0.0  # that it may take to let the worker go after SIGTERM


class Agent:
    """Serves one worker process of the mesh."""

    def __init__(
        self, options: AgentOptions, worker: Sequence[str] = WORKER, oom_kills: OomKills | None = None
    ) -> None:
        self._options = options
        self._worker = worker
        self._instance = secrets.token_hex(8)
        self._process = WorkerProcess(options.process)
        self._oom_kills = oom_kills or OomKills()
        self._was_connected = False  # to a coordinator, ever
        self._alone_since: float | None = None
        self._rejected_since: float | None = None
        self._refusal: str | None = None  # the last one, which is logged once

    async def run(self) -> None:
        """Return when the coordinator says that it ends. Raises StartError when this host is of no use."""
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
            self._process.kill()
            await self._process.stop(patience=0)
            await self._link.close()

    def leave(self, seconds: float) -> bool:
        """Ask the coordinator to let the worker go; False: there is none, and nothing to wait for.

        ``run`` returns when it has, if that takes no longer than its caller waits.
        """
        if not self._was_connected or self._alone_since is not None:
            return False
        self._link.send(AgentLeaves(process=self._options.process, seconds=seconds))
        return True

    def kill(self) -> None:
        """Kill the worker."""
        self._process.kill()

    async def _next(self) -> LinkEvent:
        """The next event. Raises StartError when there has been no coordinator for too long."""
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
                + (f" ({self._link.problem})" if self._link.problem else "")
            ) from None

    async def _act(self, event: LinkEvent) -> None:
        match event:
            case LinkChange.CONNECTED:
                self._alone_since = self._rejected_since = None
                self._was_connected = True
                logger.info("found the coordinator at %s", self._options.coordinator)
                self._say_hello()
            case LinkChange.LOST:
                self._alone_since = self._now()
                logger.warning("lost the coordinator at %s", self._options.coordinator)
                await self._process.stop(patience=0)
            case LinkChange.REJECTED:
                self._note_rejection()
            case CountDevices():
                await self._count_devices()
            case StartWorker():
                await self._start(event)
            case StopWorker():
                await self._stop(event.generation)
            case Refused(reason=reason, is_final=is_final):
                if is_final:
                    raise StartError(reason)
                if reason != self._refusal:
                    logger.warning("%s", reason)
                self._refusal = reason
                asyncio.get_running_loop().call_later(RETRY_SECONDS, self._say_hello)
            case Ping() | Quit():
                pass

    def _say_hello(self) -> None:
        self._link.send(
            AgentHello(
                process=self._options.process,
                instance=self._instance,
                host=socket.gethostname(),
                address=local_address(self._link.address),
                coordinator=addresses.split(self._link.address)[0],
                devices=self._options.devices,
                group=self._options.group,
            )
        )

    async def _count_devices(self) -> None:
        counted, visible = asdict(await count_devices(os.environ)), restriction(os.environ)
        self._link.send(DevicesFound(process=self._options.process, visible=visible, **counted))

    def _note_rejection(self) -> None:
        """Raise StartError if rejections go on from the start; later, a coordinator may be being replaced."""
        self._rejected_since = self._rejected_since or self._now()
        if not self._was_connected and self._now() - self._rejected_since >= REJECTED_SECONDS:
            raise StartError(
                f"the coordinator at {self._options.coordinator} refuses the connection: the secrets differ, "
                "or that is not its --worker-port; give all hosts the same --secret-file"
            )

    async def _start(self, order: StartWorker) -> None:
        await self._process.stop(patience=0)
        directory = await asyncio.to_thread(_model_of_host, self._options.base_model, order)
        await asyncio.to_thread(check_same, directory, order.model_files)
        logger.info("generation %d: starting worker %d", order.generation, order.process)
        self._process, self._refusal = WorkerProcess(order.process), None
        try:
            environment = of_worker(os.environ) | {VARIABLE: self._options.secret}
            ended = await self._process.start(self._command(order, directory), environment)
        except OSError as error:  # too many processes, or no memory for one more
            self._report_end(order.generation, WorkerExit(order.process, 1, (str(error),)))
            return
        ended.add_done_callback(lambda ended: self._report_end(order.generation, ended.result()))

    def _command(self, order: StartWorker, directory: Path) -> list[str]:
        command = [
            sys.executable,
            *self._worker,
            *("--coordinator", f"tcp://{self._link.address}"),
            *("--process-id", str(order.process)),
            *("--generation", str(order.generation)),
            *("--devices", str(order.devices)),
            *("--model-dir", str(directory)),
        ]
        if order.device_ids is not None and not _sees_only(order.devices):
            command += ["--device-ids", ",".join(map(str, order.device_ids))]
        return command

    async def _stop(self, generation: int) -> None:
        if self._process.is_running:
            await self._process.stop(patience=0)
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


def _model_of_host(base_model: str | None, order: StartWorker) -> Path:
    """Find the model on this host: at the coordinator's revision, if it is not a directory of its own."""
    if not base_model:
        return Path(order.model_dir)
    return find_model(base_model, None if is_directory(base_model) else order.revision)


def _sees_only(devices: int) -> bool:
    """Whether a launcher has already divided this host's GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return len([each for each in visible.split(",") if each]) == devices
