"""Runs custom losses beside the commands, in a few child processes, a piece of one loss at a time."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

from spmd_tx.custom_loss import definition as custom_loss
from spmd_tx.custom_loss.arguments import printed
from spmd_tx.processes.environments import of_losses
from spmd_tx.protocol.commands import CustomLoss
from spmd_tx.protocol.encoding import encode
from spmd_tx.protocol.reports import CustomLossEnd, CustomLossNews
from spmd_tx.worker.custom_loss.messages import (
    Close,
    LossAnswer,
    LossCompiled,
    LossCompiling,
    LossFailed,
    LossOrder,
    LossRefused,
    Open,
    Opened,
    Take,
    Taken,
    Up,
    read_answer,
)
from spmd_tx.worker.custom_loss.progress import LossRun
from spmd_tx.worker.custom_loss.turns import LossTurns

logger = logging.getLogger(__name__)

START_SECONDS = 120.0  # for a process to start
MOST_ENDS = 2  # process failures allowed, in one run or at the start
WAITING = "waiting for a process that runs custom losses"


class ChildProcess:
    """Starts and ends a process that runs process.py."""

    def __init__(self, memory_bytes: int, compilation_cache: str) -> None:
        self.pipe: Any
        self.pipe, theirs = Pipe()
        command = [sys.executable, "-m", "spmd_tx.worker.custom_loss.process"]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(memory_bytes), compilation_cache, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=of_losses(os.environ),
            )

    def end(self) -> str:
        """Kill it if it is alive; return how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)  # it may be about to exit by itself
        self._process.kill()
        code = self._process.wait()
        self.pipe.close()
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


@dataclass(eq=False)
class _Lane:
    """Holds one process and its current run."""

    process: ChildProcess
    since: float  # when its present phase began
    is_up: bool = False
    is_compiling: bool = False
    run: int | None = None
    has_open: set[int] = field(default_factory=set)
    knows: set[int] = field(default_factory=set)  # hashes of definitions

    def order(self, order: LossOrder) -> None:
        with suppress(OSError):  # reading from it will show that it is gone
            self.process.pipe.send_bytes(encode(order))


class LossLanes:
    """Runs all custom losses of a worker, in its own thread, which the first run starts."""

    def __init__(
        self,
        start: Callable[[], ChildProcess],
        lanes: int,
        report: Callable[..., None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start, self._most_lanes, self._clock = start, lanes, clock
        self._report = report
        self._arrivals: SimpleQueue[CustomLoss] = SimpleQueue()
        self._woken, self._wake = Pipe(duplex=False)
        self._runs: dict[int, LossRun] = {}
        self._turns = LossTurns()
        self._lanes: list[_Lane] = []
        self._failed_starts = 0
        self._thread: threading.Thread | None = None

    def submit(self, command: CustomLoss) -> None:
        """Start to run a loss; reports tell its progress and its end."""
        self._arrivals.put(command)
        self._wake.send_bytes(b"")
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="custom losses", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            try:
                self._assign()
                self._listen()
                self._stop_the_slow()
            except Exception:  # a run that cannot be ended would keep its client waiting for ever
                logger.exception("custom losses cannot continue; those that are running fail")
                self._begin_anew()

    def _begin_anew(self) -> None:
        lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.process.end()
        for number in list(self._runs):
            self._end(number, problem="running the loss failed by an error of the server's", is_ours=True)

    def _assign(self) -> None:
        """Give work to idle processes while there is any, and start a process if all are busy."""
        while (number := self._turns.next(self._busy_tenants())) is not None:
            lane = self._idle_lane(number)
            if lane is None:
                for waiting, run in self._runs.items():
                    if not run.reported:
                        self._tell(waiting, WAITING)
                most = self._most_lanes if self._failed_starts < MOST_ENDS else 1
                if len(self._lanes) < most and all(each.is_up for each in self._lanes):
                    self._lanes.append(_Lane(self._start(), self._clock()))
                return
            self._turns.had_its_turn(number)
            run = self._runs[number]
            lane.run, lane.since, lane.is_compiling = number, self._clock(), number not in lane.has_open
            lane.knows.add(hash(run.command.definition))
            if run.reported:
                self._tell(number, run.progress(lane.is_compiling))
            is_open = number in lane.has_open
            lane.order(
                Take(job=number, piece=run.next_piece) if is_open else Open(job=number, command=run.command)
            )

    def _busy_tenants(self) -> set[str]:
        return {self._runs[lane.run].command.tenant for lane in self._lanes if lane.run is not None}

    def _idle_lane(self, number: int) -> _Lane | None:
        """Choose an idle process, preferably one that has this run open, or its loss compiled."""
        idle = [lane for lane in self._lanes if lane.is_up and lane.run is None]
        definition = hash(self._runs[number].command.definition)
        return max(idle, key=lambda lane: (number in lane.has_open, definition in lane.knows), default=None)

    def _listen(self) -> None:
        """Wait for messages, at most until a process has taken too long."""
        now = self._clock()
        left = [(self._left(lane), now - lane.since) for lane in self._lanes]
        timeout = min((max(0.0, most - passed) for most, passed in left if most is not None), default=None)
        pipes = {lane.process.pipe: lane for lane in self._lanes}
        for ready in wait([self._woken, *pipes], timeout):
            if ready is self._woken:
                self._woken.recv_bytes()
                self._arrive(self._arrivals.get())
            elif isinstance(ready, Connection):
                self._hear(pipes[ready])

    def _arrive(self, command: CustomLoss) -> None:
        run = LossRun(command, custom_loss.decode(command.definition).name)
        self._runs[command.number] = run
        self._turns.add(command.number, command.tenant)

    def _hear(self, lane: _Lane) -> None:
        try:
            answer = read_answer(lane.process.pipe.recv_bytes())
        except (EOFError, OSError):
            self._lose(lane)
            return
        self._charge(lane)
        self._take(lane, answer)

    def _take(self, lane: _Lane, answer: LossAnswer) -> None:
        run = self._runs.get(lane.run) if lane.run is not None else None
        if isinstance(answer, Up):
            lane.is_up, self._failed_starts = True, 0
            return
        assert run is not None, answer
        number = answer.job
        match answer:
            case LossCompiling() | LossCompiled():
                lane.is_compiling = isinstance(answer, LossCompiling)
                self._tell(number, run.progress(lane.is_compiling))
                return
            case Opened():
                run.pieces = answer.pieces
                lane.has_open.add(number)
            case Taken():
                run.take(answer)
            case LossRefused():
                self._end(number, problem=answer.problem)
            case LossFailed():
                logger.error("custom loss %s failed:\n%s", printed(run.name), answer.traceback)
                problem = f"running loss '{printed(run.name)}' failed by an error of the server's"
                self._end(number, problem=problem, is_ours=True)
        lane.run = None
        if number in self._runs and run.is_done:
            self._end(number, arrays=run.arrays())

    def _charge(self, lane: _Lane) -> None:
        """Charge the time since the last call to the process's run and its tenant."""
        now = self._clock()
        if lane.run is not None:
            run = self._runs[lane.run]
            run.spend(now - lane.since, lane.is_compiling)
            self._turns.charge(run.command.tenant, now - lane.since)
        lane.since = now

    def _left(self, lane: _Lane) -> float | None:
        """Return how many seconds its present phase may take; None: any."""
        if not lane.is_up:
            return START_SECONDS
        return None if lane.run is None else self._runs[lane.run].seconds_left(lane.is_compiling)

    def _stop_the_slow(self) -> None:
        for lane in list(self._lanes):
            left = self._left(lane)
            if left is None or self._clock() - lane.since < left:
                continue
            self._charge(lane)
            number, is_compiling = lane.run, lane.is_compiling
            if number is None:
                self._lose(lane)
                continue
            lane.run = None
            self._lose(lane)
            problem = self._runs[number].too_slow(is_compiling)
            self._end(number, problem=problem, is_given_up=is_compiling)

    def _lose(self, lane: _Lane) -> None:
        """End a process, or note that it ended. Its run is tried once more in another one."""
        self._lanes.remove(lane)
        end = lane.process.end()
        if not lane.is_up:
            self._failed_starts += 1
            if self._failed_starts >= MOST_ENDS and not self._lanes:
                for number in list(self._runs):
                    problem = f"no process for custom losses could be started: it {end}"
                    self._end(number, problem=problem, is_ours=True)
        if lane.run is None:
            return
        run = self._runs[lane.run]
        run.ends += 1
        logger.warning("the process that ran custom loss %s %s", printed(run.name), end)
        if run.ends >= MOST_ENDS:
            problem = (
                f"loss '{printed(run.name)}' has ended {MOST_ENDS} processes that ran it; the last one "
                f"{end}. Perhaps it needs too much memory: send shorter datums, or keep its values smaller"
            )
            self._end(lane.run, problem=problem)

    def _tell(self, number: int, doing: str) -> None:
        run = self._runs[number]
        if run.reported != doing:
            run.reported = doing
            self._report(CustomLossNews, number=number, doing=doing)

    def _end(self, number: int, **outcome: Any) -> None:
        del self._runs[number]
        self._turns.drop(number)
        for lane in self._lanes:
            if number in lane.has_open:
                lane.has_open.discard(number)
                lane.order(Close(job=number))
        self._report(CustomLossEnd, number=number, **outcome)
