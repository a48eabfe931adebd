"""Workers on four hosts, and what becomes of a run when the network between them fails for a while."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import answers
from tests.chaos.answers import Answers, Program
from tests.hosts.host_cluster import HOSTS, HostCluster
from tests.hosts.network import Network, obstacle

SEED, ROUNDS = 0, 5
ANSWERS_BEFORE = 12  # the fault
OUTAGE_SECONDS = 25.0  # longer than it takes to notice
STUCK_SECONDS = 240.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    problem = obstacle()
    if problem is not None:
        pytest.skip(problem)
    network = Network(HOSTS)
    yield network
    network.close()


@contextlib.contextmanager
def running(folder: Path, network: Network) -> Iterator[tuple[HostCluster, Program]]:
    """Start a server on four hosts, and clients."""
    cluster = HostCluster(folder, network)
    program = Program(cluster.url, folder, SEED, ROUNDS, prefix=network.command(0, []))
    try:
        yield cluster, program
    except BaseException:
        print(cluster.log[-10_000:])
        raise
    finally:
        program.close()
        cluster.close()


@pytest.fixture(scope="module")
def undisturbed(network: Network, tmp_path_factory: pytest.TempPathFactory) -> tuple[Answers, Path]:
    folder = tmp_path_factory.mktemp("hosts") / "undisturbed"
    with running(folder, network) as (cluster, program):
        result = program.answers(cluster.check)
        assert cluster.stop() == [0] * HOSTS
    assert result.errors == []
    assert answers.miscounted_steps(result, cluster.data_dir) == []
    return result, cluster.data_dir


def wait_for_answers(cluster: HostCluster, program: Program, count: int) -> None:
    """Wait until clients had so many more answers, or all."""
    wanted, until = program.progress() + count, time.monotonic() + STUCK_SECONDS
    while program.progress() < wanted and not program.is_over():
        cluster.check()
        assert time.monotonic() < until, f"no client had an answer for {STUCK_SECONDS:.0f} s"
        time.sleep(0.02)


def assert_ends_well(cluster: HostCluster, program: Program, undisturbed: tuple[Answers, Path]) -> None:
    """Assert that the run ends like an undisturbed one."""
    expected, expected_data = undisturbed
    result = program.answers(cluster.check)
    assert cluster.stop() == [0] * HOSTS
    assert result.errors == []
    assert not answers.differences(expected, result)
    assert not answers.final_differences(expected, expected_data, result, cluster.data_dir)
    assert answers.miscounted_steps(result, cluster.data_dir) == []
    generations = cluster.log.count("starting 4 workers")
    print(f"longest pause {result.longest_pause:.1f} s, {generations} generations")


def test_a_host_whose_link_is_down_for_a_while_comes_back(tmp_path, network, undisturbed):
    with running(tmp_path / "run", network) as (cluster, program):
        wait_for_answers(cluster, program, ANSWERS_BEFORE)
        network.unplug(2)
        time.sleep(OUTAGE_SECONDS)
        network.plug_in(2)
        assert_ends_well(cluster, program, undisturbed)


def test_a_partition_that_nobody_is_told_of_heals(tmp_path, network, undisturbed):
    with running(tmp_path / "run", network) as (cluster, program):
        wait_for_answers(cluster, program, ANSWERS_BEFORE)
        network.isolate(1)
        time.sleep(OUTAGE_SECONDS)
        network.join(1)
        assert_ends_well(cluster, program, undisturbed)


def test_a_delay_of_200_ms_makes_work_slow_and_changes_nothing(tmp_path, network, undisturbed):
    with running(tmp_path / "run", network) as (cluster, program):
        wait_for_answers(cluster, program, ANSWERS_BEFORE)
        network.delay(3, seconds=0.2)
        wait_for_answers(cluster, program, 6)
        network.hurry(3)
        assert_ends_well(cluster, program, undisturbed)
        assert cluster.log.count("starting 4 workers") == 1
