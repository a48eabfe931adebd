import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmd_tx.coordinator.agent.oom_kills import OomKills, find_counters


@pytest.fixture
def machine(tmp_path):
    """Files as the kernel shows them; gives a function that writes one."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    write("proc/vmstat", "pgfault 3\noom_kill 7\n")
    return write


def found(tmp_path):
    return find_counters(tmp_path / "proc", tmp_path / "cgroup")


def test_of_version_2_the_own_group_counts(machine, tmp_path):
    machine("proc/self/cgroup", "0::/system.slice/spmd-tx.service\n")
    counter = machine("cgroup/system.slice/spmd-tx.service/memory.events", "oom 2\noom_kill 2\n")
    assert found(tmp_path) == [counter]


def test_a_container_sees_its_own_group_as_the_root(machine, tmp_path):
    machine("proc/self/cgroup", "0::/../../kubepods/pod1\n")
    counter = machine("cgroup/memory.events", "oom_kill 0\n")
    assert found(tmp_path) == [counter]


def test_of_version_1_the_memory_controller_counts(machine, tmp_path):
    machine("proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/docker/1\n0::/\n")
    counter = machine("cgroup/memory/docker/1/memory.oom_control", "under_oom 0\noom_kill 1\n")
    assert found(tmp_path) == [counter]


@pytest.mark.parametrize("told", [None, "", "0::/gone\n", "nonsense"])
def test_without_a_group_the_machine_counts(machine, tmp_path, told):
    if told is not None:
        machine("proc/self/cgroup", told)
    assert found(tmp_path) == [tmp_path / "proc" / "vmstat"]


def test_kills_are_recent_for_a_while(machine):
    counter = machine("cgroup/memory.events", "oom_kill 4\n")
    kills = OomKills([counter])
    assert not kills.were_recent()
    counter.write_text("oom_kill 5\n")
    assert kills.were_recent()
    for _ in range(14):
        kills.note()
    assert kills.were_recent()
    kills.note()
    assert not kills.were_recent()


def test_what_cannot_be_read_counts_nothing(tmp_path):
    assert not OomKills([tmp_path / "nothing"]).were_recent()


INSIDE = """\
import os, subprocess, sys
from pathlib import Path
(Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
from spmd_tx.coordinator.agent.oom_kills import OomKills
kills = OomKills()
glutton = subprocess.run([sys.executable, "-c", "b'x' * (1 << 30)"])
print(glutton.returncode, kills.were_recent())
"""


@pytest.fixture
def small_group():
    """A control group of 128 MiB within our own."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        version_2 = controllers == ""
        if not version_2 and controllers != "memory":
            continue
        tree = Path("/sys/fs/cgroup") / ("" if version_2 else "memory")
        group = tree / path.lstrip("/") / f"spmd-tx-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            limit = group / ("memory.max" if version_2 else "memory.limit_in_bytes")
            limit.write_text(str(128 << 20))
            yield group
            return
        except OSError:
            continue
        finally:
            group.rmdir()
    pytest.skip("control groups cannot be made here")


def test_a_kill_by_the_kernel_is_told_from_others(small_group):
    ran = subprocess.run(
        [sys.executable, "-c", INSIDE, str(small_group)], capture_output=True, text=True, timeout=120
    )
    assert ran.stdout.split() == ["-9", "True"], ran.stderr
