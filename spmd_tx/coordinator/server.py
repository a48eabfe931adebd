"""The coordinator's life: check, start, serve, and end in order, whatever ends it."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any, NoReturn

import msgspec

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.app import make_app
from spmd_tx.coordinator.assembly import GENERATION, Parts, ServedModel, make_batch, open_model, open_parts
from spmd_tx.coordinator.broadcast import Hub
from spmd_tx.coordinator.housekeeping import keep_house
from spmd_tx.coordinator.http_server import HttpServer, quiet
from spmd_tx.coordinator.preflight import listen
from spmd_tx.coordinator.supervisor import Supervisor, WorkerExit
from spmd_tx.errors import MeshError, StartError, WorkerLost
from spmd_tx.protocol import Shutdown

logger = logging.getLogger(__name__)

WORKER = ("-m", "spmd_tx.worker.main")

GRACE_SECONDS = 10.0  # after workers are lost: for clients to be told
QUIET_SECONDS = 2.0  # without any request: they all have been
FLUSH_SECONDS = 5.0
SHUTDOWN_SECONDS = 10.0  # for workers to finish what they are doing
STORY_SECONDS = 1.0  # between a worker's report and its end, whichever comes first


async def serve(config: ServerConfig, worker: Sequence[str] = WORKER) -> int:
    """Run the server until a signal or a failure ends it; the result is the exit code.

    Raises StartError when the configuration cannot work. ``worker`` is what Python runs as a worker.
    """
    _log_to_stderr()
    config = msgspec.structs.replace(config, data_dir=config.data_dir.absolute())
    listening = listen(config.host, config.port)
    with listening:
        model = await asyncio.to_thread(open_model, config)
        _make_directory(config)
        async with AsyncExitStack() as stack:
            parts = await open_parts(config, model, stack)
            server = _Server(config, model, parts, listening, worker)
            stack.push_async_callback(server.close)
            return await server.run()


class _Server:
    """A server whose parts are there."""

    def __init__(
        self,
        config: ServerConfig,
        model: ServedModel,
        parts: Parts,
        listening: socket.socket,
        worker: Sequence[str],
    ) -> None:
        self._config = config
        self._model = model
        self._parts = parts
        self._host, self._port = config.host, listening.getsockname()[1]
        self._http = HttpServer(make_app(parts.services), listening)
        self._worker = worker
        self._supervisor = Supervisor(self._worker_command, config.num_processes)
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[Any]] = []

    async def run(self) -> int:
        """Start everything, wait for the first thing that ends, and let clients know."""
        parts = self._parts
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._take_signal)
        writing = self._spawn(parts.services.queue.run())
        answering = self._spawn(self._http.run())
        await self._supervisor.start()
        losing = self._spawn(_loss(parts.hub, self._supervisor))
        working = self._spawn(self._work())
        keeping = self._spawn(keep_house(parts.services))
        stopping = self._spawn(self._stop.wait())
        await asyncio.wait(
            [writing, answering, losing, working, keeping, stopping],
            return_when=asyncio.FIRST_COMPLETED,
        )
        if stopping.done():
            await self._end_in_order(answering)
            return 0
        problem = working.exception() if working.done() else None
        if isinstance(problem, StartError):
            raise problem
        if isinstance(problem, MeshError):
            await asyncio.wait([losing])
        if losing.done():
            await self._tell_clients(losing.result(), answering)
            return 1
        await self._tell_clients("the server has failed because of a bug; its log says more", answering)
        raise _first_error(self._tasks)

    async def close(self) -> None:
        """End what is still running."""
        await self._supervisor.stop(patience=0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().remove_signal_handler(number)

    async def _work(self) -> NoReturn:
        """Serve requests as soon as the workers are ready."""
        parts = self._parts
        ready = await parts.hub.all_ready()
        batch = make_batch(self._config, self._model, parts.bank, ready)
        parts.health.ready = True
        logger.info("%s on %s, %d pages", self._config.model_name, ready.device, ready.pages)
        print(f"ready: http://{self._host}:{self._port}", flush=True)
        await parts.scheduler.run(batch)

    async def _end_in_order(self, answering: asyncio.Task[None]) -> None:
        logger.info("shutting down")
        await self._fail_requests("the server is shutting down; send the request again when it is back")
        self._http.stop()
        await asyncio.wait([answering])
        if self._parts.health.ready:
            self._parts.hub.send(Shutdown())
            await self._supervisor.stop(patience=SHUTDOWN_SECONDS)

    async def _tell_clients(self, message: str, answering: asyncio.Task[None]) -> None:
        """Fail all that is pending, and answer until clients have heard of it."""
        logger.error("%s", message)
        self._parts.hub.lose(WorkerLost(message))
        self._supervisor.kill()
        await self._fail_requests(message)
        told = self._spawn(quiet(self._http, QUIET_SECONDS, GRACE_SECONDS))
        await asyncio.wait([told, self._spawn(self._stop.wait())], return_when=asyncio.FIRST_COMPLETED)
        self._http.stop()
        await asyncio.wait([answering])

    async def _fail_requests(self, message: str) -> None:
        self._parts.health.failure = message
        self._parts.services.queue.fail_unfinished(message)
        await asyncio.wait([self._spawn(self._parts.services.queue.flush())], timeout=FLUSH_SECONDS)

    def _take_signal(self) -> None:
        if self._stop.is_set():
            self._supervisor.kill()
            os._exit(1)
        self._stop.set()

    def _worker_command(self, number: int) -> list[str]:
        config = self._config
        return [
            sys.executable,
            *self._worker,
            *("--coordinator", self._parts.hub.address),
            *("--process-id", str(number)),
            *("--generation", str(GENERATION)),
            *("--devices", str(config.mesh_size // config.num_processes)),
        ]

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task


async def _loss(hub: Hub, supervisor: Supervisor) -> str:
    """Wait until a worker is lost; say which, and why."""
    receiving = asyncio.create_task(hub.run())
    ending = asyncio.create_task(supervisor.first_exit())
    try:
        await asyncio.wait([receiving, ending], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait([receiving, ending], timeout=STORY_SECONDS)
    finally:
        receiving.cancel()
        ending.cancel()
        await asyncio.wait([receiving, ending])
    ended = None if ending.cancelled() else ending.result()
    error = None if receiving.cancelled() else receiving.exception()
    if error is not None and not isinstance(error, MeshError):
        raise error
    return _story(ended, error)


def _story(ended: WorkerExit | None, error: BaseException | None) -> str:
    parts = [str(part) for part in (ended, error) if part is not None]
    if ended is not None and ended.last_lines and error is None:
        parts.append("its last words: " + " | ".join(ended.last_lines))
    return "; ".join(parts) + ". The server ends; its operator has to start it again"


def _first_error(tasks: list[asyncio.Task[Any]]) -> BaseException:
    errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    return next(
        (error for error in errors if error is not None), RuntimeError("a part of the server has ended")
    )


def _make_directory(config: ServerConfig) -> None:
    try:
        config.data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"cannot create --data-dir {config.data_dir}: {error.strerror}") from None


def _log_to_stderr() -> None:
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING
    )
    logging.getLogger("spmd_tx").setLevel(logging.INFO)
