import asyncio
import os
import signal
import sys

import psutil
import pytest

from spmd_tx.errors import Abandoned, ForeignCodeFailed, InvalidRequest
from spmd_tx.processes.child import Allowance, LastingChild, call_outside
from spmd_tx.processes.child_messages import LENGTH_BYTES, Broke, encode
from spmd_tx.processes.modest import NICENESS
from tests.support.processes import until_ended

SECONDS = 60.0
ENOUGH = Allowance(SECONDS)
FOREIGN = "tests.support.foreign_code"

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


async def call(function, allowance=ENOUGH, **arguments):
    return await call_outside(f"{FOREIGN}:{function}", arguments, allowance)


async def test_what_a_function_returns_comes_back_whatever_it_prints():
    assert await call("add", left=2, right=3) == 5


async def test_a_refusal_of_the_request_stays_one():
    with pytest.raises(InvalidRequest, match="'a key' is refused"):
        await call("refuse", text="a key")


async def test_trouble_with_the_disk_stays_what_it_is():
    with pytest.raises(OSError, match="No space left") as caught:
        await call("full_disk", path="/a/file")
    assert (caught.value.errno, caught.value.filename) == (28, "/a/file")


@pytest.mark.parametrize(
    "function, told",
    [
        ("panic", "PanicException: index out of bounds"),
        ("leave", "SystemExit"),
        ("abort", r"signal 6 \(SIGABRT\)"),
        ("access_nothing", r"signal 11 \(SIGSEGV\)"),
        ("take_memory", "MemoryError"),
        ("is_not_there", "has no attribute"),
    ],
)
async def test_whatever_ends_the_child_is_an_error_of_this_one_call(function, told):
    with pytest.raises(ForeignCodeFailed, match=told) as caught:
        await call(function)
    assert isinstance(caught.value, Abandoned)  # the server's fault, and no reason to try again


@pytest.mark.parametrize("content", [b"\xc1", encode(Broke("x", ""))[LENGTH_BYTES:].replace(b"x", b"\xff")])
async def test_what_is_no_answer_is_an_error_of_this_one_call(content):
    with pytest.raises(ForeignCodeFailed, match="babble wrote into its answer"):
        await call("babble", content=len(content).to_bytes(LENGTH_BYTES) + content)


async def test_an_answer_is_bounded_by_the_memory_that_it_may_take():
    with pytest.raises(ForeignCodeFailed):
        await call("boast", Allowance(SECONDS, memory=100 << 20))


async def pids_in(folder) -> list[int]:
    async with asyncio.timeout(SECONDS):
        while not (folder / "pids").exists():
            await asyncio.sleep(0.01)
    return [int(pid) for pid in (folder / "pids").read_text().split()]


async def are_gone(pids):
    await asyncio.to_thread(until_ended, pids)


async def test_a_child_that_hangs_is_ended_with_its_own_children(tmp_path):
    with pytest.raises(ForeignCodeFailed, match="longer than 2 s"):
        await call("hang", Allowance(2.0), folder=str(tmp_path))
    await are_gone(await pids_in(tmp_path))


async def test_a_caller_that_leaves_takes_the_child_with_it(tmp_path):
    calling = asyncio.create_task(call("hang", folder=str(tmp_path)))
    pids = await pids_in(tmp_path)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await are_gone(pids)


PARENT = """\
import asyncio, sys
from spmd_tx.processes.child import Allowance, call_outside
asyncio.run(call_outside("tests.support.foreign_code:hang", {"folder": sys.argv[1]}, Allowance(3600.0)))
"""


@linux_only
async def test_a_child_ends_with_its_parent(tmp_path):
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, str(tmp_path))
    child, grandchild = await pids_in(tmp_path)
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    await are_gone([child])
    os.kill(grandchild, signal.SIGKILL)


@linux_only
async def test_a_child_has_limits_and_nothing_that_it_does_not_need(monkeypatch):
    for name in ("SPMD_TX_SECRET", "SPMD_TX_DATABASE_URL", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "hunter2")
    found = await call("surroundings", Allowance(SECONDS, memory=1 << 30, environment={"XLA_FLAGS": "--a"}))
    assert "hunter2" not in found["environment"].values()
    assert found["environment"]["XLA_FLAGS"] == "--a"
    assert found["stdin"] == b""
    assert found["limits"] == {"RLIMIT_CORE": [0, 0], "RLIMIT_AS": [1 << 30, 1 << 30]}
    assert found["oom_score_adj"] == "1000"
    assert found["niceness"] == min(os.nice(0) + NICENESS, 19)
    assert not found["session"] or found["session"].endswith(f"nice {NICENESS}")
    assert found["descriptors"] <= 6  # its standard ones, the answer, and the listing itself


@pytest.fixture
async def lasting():
    child = LastingChild(Allowance(SECONDS, memory=1 << 30))
    yield child
    await child.close()


async def own_pid(child) -> int:
    return (await child.call(f"{FOREIGN}:surroundings", {}))["pid"]


async def test_a_child_that_lasts_is_the_same_for_all_calls_and_refusals(lasting):
    pid = await own_pid(lasting)
    with pytest.raises(InvalidRequest, match="'a key' is refused"):
        await lasting.call(f"{FOREIGN}:refuse", {"text": "a key"})
    assert await own_pid(lasting) == pid
    await lasting.close()
    await are_gone([pid])


@pytest.mark.parametrize("function", ["panic", "leave", "abort", "take_memory"])
async def test_a_child_that_lasts_is_another_one_after_a_failure(lasting, function):
    pid = await own_pid(lasting)
    with pytest.raises(ForeignCodeFailed):
        await lasting.call(f"{FOREIGN}:{function}", {})
    await are_gone([pid])
    assert await own_pid(lasting) != pid


async def test_a_call_that_is_cancelled_does_not_answer_the_next(lasting, tmp_path):
    calling = asyncio.create_task(lasting.call(f"{FOREIGN}:hang", {"folder": str(tmp_path)}))
    pids = await pids_in(tmp_path)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    await are_gone(pids)
    assert await lasting.call(f"{FOREIGN}:add", {"left": 2, "right": 3}) == 5


async def test_a_child_that_is_killed_between_calls_fails_none(lasting):
    pid = await own_pid(lasting)
    os.kill(pid, signal.SIGKILL)
    await are_gone([pid])
    while psutil.pid_exists(pid):  # this process has not noticed it yet
        await asyncio.sleep(0.01)
    assert await own_pid(lasting) != pid


async def test_a_child_ends_when_there_are_no_calls():
    child = LastingChild(ENOUGH, idle_seconds=0.01)
    pid = await own_pid(child)
    await are_gone([pid])
    assert await own_pid(child) != pid
    await child.close()


@linux_only
async def test_each_call_has_the_processor_time_of_its_own(lasting):
    for found in [await lasting.call(f"{FOREIGN}:surroundings", {}) for _ in range(2)]:
        assert SECONDS < found["processor_seconds_left"] <= SECONDS + 10


@linux_only
async def test_a_call_that_is_the_only_one_cannot_raise_its_processor_time():
    found = await call_outside(f"{FOREIGN}:surroundings", {}, ENOUGH)
    assert SECONDS <= found["processor_seconds"][0] == found["processor_seconds"][1] <= SECONDS + 20
