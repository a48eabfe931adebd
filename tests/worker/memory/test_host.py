import psutil
import pytest

from spmd_tx.worker.memory import host
from spmd_tx.worker.memory.host import host_bytes, idle_budget

LIMIT, USE = 1000, 400  # bytes; every computer has more


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """Where the kernel would say how much memory a container may use, and how much it does."""
    limit, use = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(host, "CGROUPS", [(limit, use)])
    return limit, use


@pytest.mark.parametrize(
    ("limit", "use", "expected"),
    [
        (f"{LIMIT}\n", f"{USE}\n", (LIMIT, LIMIT - USE)),
        (f"{LIMIT}\n", f"{LIMIT + 1}\n", (LIMIT, 0)),  # the kernel is about to take some back
        (f"{LIMIT}\n", None, (LIMIT, LIMIT)),
    ],
)
def test_a_container_has_what_its_limit_leaves(cgroup, limit, use, expected):
    for path, text in zip(cgroup, (limit, use), strict=True):
        if text is not None:
            path.write_text(text)
    assert host_bytes() == expected


@pytest.mark.parametrize("limit", ["max\n", f"{1 << 62}\n", None])
def test_without_a_limit_the_host_counts(cgroup, limit):
    for path, text in zip(cgroup, (limit, "0\n"), strict=True):
        if text is not None:
            path.write_text(text)
    total, free = host_bytes()
    assert total == psutil.virtual_memory().total
    assert LIMIT < free < total


def test_processes_of_a_host_share_what_idle_adapters_may_take(cgroup):
    for path, number in zip(cgroup, (LIMIT, USE), strict=True):
        path.write_text(str(number))
    assert idle_budget(1) == host.IDLE_SHARE * (LIMIT - USE)
    assert 3 * idle_budget(3) == pytest.approx(idle_budget(1), abs=3)
