"""Runs the coordinator's life: checks, starts, serves, and ends in order, whatever ends it."""

import asyncio
import logging
import os
import secrets
import signal
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.agent.agent import WORKER
from spmd_tx.coordinator.groups.group import WorkerGroup
from spmd_tx.coordinator.groups.run_groups import GroupRuns
from spmd_tx.coordinator.http.app import make_app
from spmd_tx.coordinator.http.public_address import networks
from spmd_tx.coordinator.http.security.connections import open_connections
from spmd_tx.coordinator.http.security.tls import context_of
from spmd_tx.coordinator.http.uvicorn_server import HttpServer
from spmd_tx.coordinator.mesh.port import WorkerPort
from spmd_tx.coordinator.runtime import metrics
from spmd_tx.coordinator.runtime.logs import log_to_stderr
from spmd_tx.coordinator.runtime.loop_watchdog import watching
from spmd_tx.coordinator.runtime.open_files import raise_limit
from spmd_tx.coordinator.runtime.side_by_side import until_one_ends
from spmd_tx.coordinator.server.build import Parts, open_parts
from spmd_tx.coordinator.server.group_builder import WorkerAccess
from spmd_tx.coordinator.server.housekeeping import run_housekeeping
from spmd_tx.coordinator.server.preflight import check_folders, check_hosts, check_keys, listen
from spmd_tx.coordinator.server.served_model import open_models
from spmd_tx.coordinator.storage.database import make_directory
from spmd_tx.errors import CrashLoop, StartError
from spmd_tx.processes import private
from spmd_tx.protocol import memory_plan
from spmd_tx.protocol.addresses import joined
from spmd_tx.protocol.reports import Ready
from spmd_tx.protocol.secret import Keys, read_secret

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOPPING = "the server is shutting down; send the request again when it is back"
DRAIN_LOOK_SECONDS = 0.1  # between looks whether all work is done
MOST_RESERVED_SECONDS = 10.0  # of the time to end in: for snapshots, and for workers to end
FLUSH_SECONDS = 5.0
LINGER_SECONDS = 1.0  # for agents to hear that the server ends


async def serve(config: ServerConfig, worker: Sequence[str] = WORKER) -> int:
    """Run the server until a signal or a failure ends it; the result is the exit code.

    Raises StartError when the configuration cannot work. ``worker`` is what Python runs as a worker.
    """
    log_to_stderr(config.log_format)
    starting = _Starting()
    try:
        return await _serve(config, worker)
    except asyncio.CancelledError:
        if not starting.was_ended:
            raise
        logger.info("ended by a signal before it was ready")
        logging.shutdown()
        os._exit(0)  # a thread may be downloading the model


async def _serve(config: ServerConfig, worker: Sequence[str]) -> int:
    # The roster tells the same.
    logging.getLogger("spmd_tx.coordinator.agent.agent").setLevel(logging.WARNING)
    config = msgspec.structs.replace(
        config,
        data_dir=config.data_dir.absolute(),
        host=config.host.strip("[]"),
        worker_host=config.worker_host.strip("[]"),
    )
    secret = read_secret(config.secret_file)
    check_folders(config)
    check_hosts(config, secret)
    networks(config.trusted_proxies)
    tls = context_of(config.tls_cert, config.tls_key)
    secret = secret or secrets.token_hex(32)
    open_files = raise_limit()
    listening = listen(config.host, config.port, open_files)
    with listening:
        make_directory(config.data_dir)
        models = await asyncio.to_thread(open_models, config)
        warning = private.warning_about(config.data_dir)
        if warning is not None:
            logger.warning("%s", warning)
        async with AsyncExitStack() as stack:
            port = WorkerPort(config.worker_host, config.worker_port, Keys.of(secret))
            stack.callback(port.close, LINGER_SECONDS)
            parts = await open_parts(config, models, WorkerAccess(port, secret, worker), stack)
            is_open = parts.services.keyring.is_open
            warning = check_keys(config, listening.getsockname()[0], is_open)
            if warning is not None:
                logger.warning("%s", warning)
            connections = open_connections(config.bounds, open_files)
            http = HttpServer(make_app(parts.services), listening, connections, tls)
            server = _Server(config, parts, http)
            if any(group.agents_here < group.num_processes for group in config.all_groups):
                logger.info("workers join at %s, port %d", port.host, port.port)
            stack.push_async_callback(server.close)
            with watching(asyncio.get_running_loop()):
                return await server.run()


class _Starting:
    """Lets signals end the task that starts the server, until the server handles them itself."""

    def __init__(self) -> None:
        self.was_ended = False
        task = asyncio.current_task()
        assert task is not None
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._end, task)

    def _end(self, task: asyncio.Task[Any]) -> None:
        if self.was_ended:
            os._exit(1)
        self.was_ended = True
        task.cancel()


class _Server:
    """Runs a server whose parts are built."""

    def __init__(self, config: ServerConfig, parts: Parts, http: HttpServer) -> None:
        self._config = config
        self._parts = parts
        self._http = http
        self._has_been_ready = False
        self._stop = asyncio.Event()
        self._tasks: list[asyncio.Task[Any]] = []

    async def run(self) -> int:
        """Start everything, and wait for the first part that ends."""
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._take_signal)
        parts = self._parts
        answering = self._spawn(self._http.run())
        stopping = self._spawn(self._stop.wait())
        has_several = len(self._config.all_groups) > 1
        runs = GroupRuns(parts.groups, self._note_ready, has_others=has_several)
        for lasting in (
            parts.services.queue.run(parts.router.arrive),
            parts.reception.receive(),
            *(group.generations.watch() for group in parts.groups),
            runs.run(),
            parts.late.run(
                lambda group: until_one_ends([group.generations.watch(), runs.keep_running(group)])
            ),
            run_housekeeping(parts.services),
            parts.services.keyring.watch(),
            parts.given_up.watch(),
        ):
            self._spawn(lasting)
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            await self._end_in_order(answering)
            return 0
        error = _first_error(self._tasks)
        if isinstance(error, CrashLoop):
            logger.error("%s", error)
        elif not isinstance(error, StartError):
            logger.error("a part that the server needs has ended", exc_info=error)
        await self._close_api(answering)
        await self._shut_down(patience=0)
        if isinstance(error, CrashLoop):
            return 1
        raise error

    async def close(self) -> None:
        """End what is still running."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _note_ready(self, group: WorkerGroup, ready: Ready) -> None:
        """Tell that the workers of a group serve requests."""
        logger.info("%s on %s, %d pages", group.base.name, ready.device, ready.plan.pages)
        logger.info("memory of each device: %s", memory_plan.summary(ready.plan))
        metrics.show_plan(ready.plan)
        if not self._has_been_ready:
            scheme = "http" if self._config.tls_cert is None else "https"
            url = f"{scheme}://{joined(self._config.host, self._http.port)}"
            print(f"ready: {url}\nconsole: {url}/console", flush=True)
            self._has_been_ready = True

    async def _end_in_order(self, answering: asyncio.Task[None]) -> None:
        """Finish what can be finished in time; the log keeps the rest for the next start."""
        logger.info("shutting down")
        parts = self._parts
        parts.health.refusal = STOPPING
        now, seconds = asyncio.get_running_loop().time, self._config.drain_seconds
        deadline, reserved = now() + seconds, min(MOST_RESERVED_SECONDS, seconds / 3)
        await self._finish(deadline - reserved)
        try:
            async with asyncio.timeout_at(deadline - reserved / 2):
                await asyncio.gather(*(group.scheduler.drain() for group in parts.groups))
        except TimeoutError:
            logger.warning("no time for all snapshots; the next start will run more requests again")
        await self._flush()  # before clients that wait are sent away
        await self._close_api(answering)
        await self._flush()
        await self._shut_down(patience=max(0.0, deadline - now()))

    async def _shut_down(self, patience: float) -> None:
        """End all workers, within a limit, and then the agents."""
        await asyncio.gather(*(group.generations.shut_down(patience) for group in self._parts.groups))

    async def _flush(self) -> None:
        await asyncio.wait([self._spawn(self._parts.services.queue.flush())], timeout=FLUSH_SECONDS)

    async def _close_api(self, answering: asyncio.Task[None]) -> None:
        """Answer the clients that wait, and take no more requests."""
        self._parts.health.closing.set_result(None)
        self._http.stop()
        await asyncio.wait([answering])

    async def _finish(self, deadline: float) -> None:
        """Wait until there is no unfinished work, within a limit."""
        try:
            async with asyncio.timeout_at(deadline):
                while self._parts.router.has_unfinished:
                    await asyncio.sleep(DRAIN_LOOK_SECONDS)
        except TimeoutError:
            logger.warning("some requests are not finished; the next start continues them")

    def _take_signal(self) -> None:
        if self._stop.is_set():
            for group in self._parts.groups:
                for agent in group.agents:
                    agent.kill()
            os._exit(1)
        self._stop.set()

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task


def _first_error(tasks: list[asyncio.Task[Any]]) -> BaseException:
    errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    return next(
        (error for error in errors if error is not None), RuntimeError("a part of the server has ended")
    )
