import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import psutil
import pytest

from spmd_tx.coordinator.supervisor import Supervisor, WorkerExit

SLEEP = "import time; time.sleep(3600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); {SLEEP}"


@asynccontextmanager
async def supervising(*programs):
    supervisor = Supervisor(lambda worker: [sys.executable, "-c", programs[worker]], len(programs))
    await supervisor.start()
    yield supervisor
    supervisor.kill()
    await supervisor.stop(patience=10)


async def test_the_first_worker_to_end_is_named_with_its_code_and_last_lines():
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    async with supervising(SLEEP, program) as supervisor:
        exit = await supervisor.first_exit()
    assert (exit.worker, exit.code, sorted(exit.last_lines)) == (1, 3, ["err", "out"])
    assert str(exit) == "worker 1 exited with code 3"


async def test_only_the_last_lines_are_quoted(capfd):
    async with supervising("for line in range(1000): print(line)") as supervisor:
        exit = await supervisor.first_exit()
    assert exit.last_lines == tuple(str(line) for line in range(992, 1000))
    printed = capfd.readouterr()
    assert "worker 0: 999\n" in printed.err
    assert printed.out == ""


async def test_a_line_without_end_does_no_harm():
    async with supervising("print('x' * 3_000_000)") as supervisor:
        assert (await supervisor.first_exit()).code == 0


async def test_a_killed_worker_is_said_to_have_been_killed():
    async with supervising(SLEEP) as supervisor:
        os.kill(supervisor.pids[0], signal.SIGKILL)
        assert str(await supervisor.first_exit()) == "worker 0 was killed by signal 9 (SIGKILL)"


async def test_workers_that_end_by_themselves_are_waited_for():
    async with supervising("import time; time.sleep(0.2)") as supervisor:
        await supervisor.stop(patience=30)
        assert await supervisor.first_exit() == WorkerExit(0, 0)


async def test_workers_that_do_not_end_are_ended(monkeypatch):
    monkeypatch.setattr("spmd_tx.coordinator.supervisor.TERMINATE_SECONDS", 0.5)
    async with supervising(SLEEP, STUBBORN) as supervisor:
        await supervisor.stop(patience=0.5)
        assert not any(psutil.pid_exists(pid) for pid in supervisor.pids)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_workers_die_with_a_coordinator_that_is_killed():
    program = f"""
import asyncio, sys
from spmd_tx.coordinator.supervisor import Supervisor

async def main():
    supervisor = Supervisor(lambda worker: [sys.executable, "-c", {STUBBORN!r}], 2)
    await supervisor.start()
    print(*supervisor.pids, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as coordinator:
        pids = [int(pid) for pid in coordinator.stdout.readline().split()]
        for _ in pids:
            assert coordinator.stderr.readline().endswith("up\n")
        coordinator.kill()
    deadline = time.monotonic() + 20
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def test_workers_do_not_share_the_terminal_of_the_coordinator():
    async with supervising("import os; print(os.getsid(0) == os.getpid())") as supervisor:
        assert (await supervisor.first_exit()).last_lines == ("True",)
        await asyncio.sleep(0)
