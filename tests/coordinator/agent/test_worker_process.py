import asyncio
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from spmd_tx.coordinator.agent.worker_process import WorkerExit, WorkerProcess, _relay
from tests.support.processes import until_ended

SLEEP = "import time; time.sleep(3600)"
AWAKE = f"print('up', flush=True); {SLEEP}"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {AWAKE}"


class Running:
    """A supervisor whose process has been started, and its end."""

    def __init__(self, supervisor, ended):
        self.supervisor, self.ended = supervisor, ended


@pytest.fixture
async def start():
    supervisors = []

    async def start(program, worker=0, environment=None):
        supervisors.append(WorkerProcess(worker))
        ended = await supervisors[-1].start([sys.executable, "-c", program], environment or os.environ)
        return Running(supervisors[-1], ended)

    yield start
    for supervisor in supervisors:
        supervisor.kill()
        await supervisor.stop(patience=10)


async def test_a_worker_that_ends_is_named_with_its_code_and_last_lines(start):
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    exit = await (await start(program, worker=1)).ended
    assert (exit.worker, exit.code, sorted(exit.last_lines)) == (1, 3, ["err", "out"])
    assert str(exit) == "worker 1 exited with code 3"


async def test_only_the_last_lines_are_quoted(start, caplog):
    caplog.set_level(logging.INFO, "spmd_tx")
    exit = await (await start("for line in range(1000): print(line)")).ended
    assert exit.last_lines == tuple(str(line) for line in range(992, 1000))
    assert [record.getMessage() for record in caplog.records if getattr(record, "worker", None) == 0][
        -1
    ] == "999"


async def test_of_an_abort_the_reason_is_quoted_and_not_the_stack(start):
    program = (
        "print('no peer'); print('*** stack trace: ***'); [print('    @ 0x7f frame()') for _ in range(50)]"
    )
    assert (await (await start(program)).ended).last_lines == ("no peer", "*** stack trace: ***")


async def test_a_line_without_end_does_no_harm(start):
    assert (await (await start("print('x' * 3_000_000)")).ended).code == 0


async def test_a_killed_worker_is_said_to_have_been_killed(start):
    running = await start(SLEEP)
    assert running.supervisor.is_running
    os.kill(running.supervisor.pid, signal.SIGKILL)
    assert str(await running.ended) == "worker 0 was killed by signal 9 (SIGKILL)"
    assert not running.supervisor.is_running


async def test_a_worker_that_ends_by_itself_is_waited_for(start):
    running = await start("import time; time.sleep(0.2)")
    await running.supervisor.stop(patience=30)
    assert await running.ended == WorkerExit(0, 0)


@pytest.mark.parametrize("program, code", [(AWAKE, -signal.SIGTERM), (STUBBORN, -signal.SIGKILL)])
async def test_a_worker_that_does_not_end_is_ended(start, monkeypatch, caplog, program, code):
    caplog.set_level(logging.INFO, "spmd_tx")
    monkeypatch.setattr("spmd_tx.coordinator.agent.worker_process.TERMINATE_SECONDS", 0.2)
    running = await start(program)
    while "up" not in caplog.messages:  # from then on it ignores the signal, if it does
        await asyncio.sleep(0.01)
    await running.supervisor.stop(patience=0)
    assert (await running.ended).code == code
    assert not psutil.pid_exists(running.supervisor.pid)


async def test_a_worker_that_has_ended_while_its_last_lines_are_read_can_be_stopped(start, monkeypatch):
    may_end = asyncio.Event()

    async def slow_relay(*arguments):
        await _relay(*arguments)
        await may_end.wait()

    monkeypatch.setattr("spmd_tx.coordinator.agent.worker_process._relay", slow_relay)
    running = await start("raise SystemExit(3)")
    while running.supervisor._started.process.returncode is None:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)  # its pipes are closed
    assert not running.ended.done()
    await running.supervisor.stop(patience=0)
    assert running.ended.result().code == 3


async def test_another_worker_can_follow(start):
    running = await start("pass")
    await running.ended
    again = await running.supervisor.start([sys.executable, "-c", "exit(4)"], os.environ)
    assert (await again).code == 4


async def test_a_worker_has_the_environment_that_it_is_given(start):
    program = "import os; print(os.environ['SPMD_TX_SECRET'])"
    running = await start(program, environment={"SPMD_TX_SECRET": "quiet"})
    assert (await running.ended).last_lines == ("quiet",)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_worker_dies_with_an_agent_that_is_killed():
    program = f"""
import asyncio, os, sys
from spmd_tx.coordinator.agent.worker_process import WorkerProcess
from spmd_tx.coordinator.runtime.logs import log_to_stderr

async def main():
    log_to_stderr("text")
    supervisor = WorkerProcess(0)
    await supervisor.start([sys.executable, "-c", {STUBBORN!r}], os.environ)
    print(supervisor.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as agent:
        try:
            pid = int(agent.stdout.readline())
            assert agent.stderr.readline().endswith("up\n")
        finally:
            agent.kill()
    until_ended([pid])


async def test_workers_do_not_share_the_terminal_of_the_coordinator(start):
    running = await start("import os; print(os.getsid(0) == os.getpid())")
    assert (await running.ended).last_lines == ("True",)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_without_memory_the_kernel_takes_a_worker_before_its_parent(start):
    program = "print(open('/proc/self/oom_score_adj').read())"
    (told,) = (await (await start(program)).ended).last_lines
    own = int(Path("/proc/self/oom_score_adj").read_text())
    assert int(told) == min(1000, own + 500)
