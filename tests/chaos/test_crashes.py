"""A run that is interrupted by kills at any moment ends like an undisturbed one."""

import contextlib
import functools
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import answers, tenants
from tests.chaos.answers import Answers, Program
from tests.chaos.attack import Attack
from tests.chaos.cluster import AGENT, COORDINATOR, Cluster
from tests.chaos.outcome import Outcome, table
from tests.chaos.postgres import Postgres
from tests.chaos.tenants import Tenant

SHORT_ROUNDS, SHORT_KILLS = 2, 2  # of the short runs
LONG_ROUNDS, LONG_KILLS = 30, 27  # of every run of `make chaos`
LONG_SECONDS = 18 * 60  # after which it kills no more
SEEDS = 1, 2, 3, 4
DATABASES = "SQLite", "PostgreSQL"
QUICKLY = "SQLite", pytest.param("PostgreSQL", marks=pytest.mark.chaos)
SNAPSHOT_SECONDS = 1
GOOD_EXITS = 0, -signal.SIGKILL  # the last kill may come when clients have all they wanted

Undisturbed = Callable[[int, int], tuple[Answers, Path]]

pytestmark = pytest.mark.timeout(1300)


@contextlib.contextmanager
def running(
    folder: Path, seed: int, rounds: int, *, who: Sequence[Tenant] = tenants.ALL, **options: Any
) -> Iterator[tuple[Cluster, Program]]:
    """Start a cluster, and clients that use it."""
    folder.mkdir()
    cluster = Cluster(folder, snapshot_seconds=SNAPSHOT_SECONDS, **options)
    program = Program(cluster.url, folder, seed, rounds, who=who)
    try:
        cluster.start()
        yield cluster, program
    except BaseException:
        print((folder / "log").read_text()[-10_000:])
        raise
    finally:
        program.close()
        cluster.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return the undisturbed run of a seed: its answers, and its data."""
    root = tmp_path_factory.mktemp("undisturbed")

    @functools.cache
    def run(seed: int, rounds: int) -> tuple[Answers, Path]:
        with running(root / f"{seed}-{rounds}", seed, rounds) as (cluster, program):
            result = program.answers(cluster.check)
            assert cluster.stop() == {COORDINATOR: 0, AGENT: 0}
        assert result.errors == []
        assert answers.miscounted_steps(result, cluster.data_dir) == []
        return result, cluster.data_dir

    return run


@pytest.fixture
def database(request: pytest.FixtureRequest) -> Iterator[Postgres | None]:
    if request.param == "SQLite":
        yield None
        return
    postgres = Postgres()
    yield postgres
    postgres.close()


@pytest.fixture(scope="module")
def outcomes() -> Iterator[list[Outcome]]:
    """Collect the outcomes of all runs, and print them at the end."""
    found: list[Outcome] = []
    yield found
    print("\n" + table(found))


@pytest.fixture(scope="module")
def deadline() -> float:
    return time.monotonic() + LONG_SECONDS


def disturbed(
    folder: Path,
    seed: int,
    rounds: int,
    kills: int,
    undisturbed: Undisturbed,
    database: Postgres | None,
    deadline: float,
) -> Outcome:
    """Run the same program once more, this time with kills, and compare."""
    expected, expected_data = undisturbed(seed, rounds)
    options: dict[str, Any] = {} if database is None else {"database_url": database.url}
    with running(folder, seed, rounds, **options) as (cluster, program):
        attack = Attack(cluster, program, seed, deadline)
        attack.run(kills, database and database.kill)
        result = program.answers(cluster.check)
        exits = cluster.stop()
    return Outcome(
        database="SQLite" if database is None else "PostgreSQL",
        seed=seed,
        kills=attack.kills,
        cuts=attack.cuts,
        differences=answers.differences(expected, result)
        + answers.final_differences(expected, expected_data, result, cluster.data_dir),
        miscounted_steps=answers.miscounted_steps(result, cluster.data_dir),
        errors=result.errors,
        bad_exits=[
            *cluster.exits,
            *(f"{role}: {code}" for role, code in exits.items() if code not in GOOD_EXITS),
        ],
        longest_pause=result.longest_pause,
        seconds=result.seconds,
        steps=result.count("step") + result.count("branch"),
    )


@pytest.mark.slow
@pytest.mark.parametrize("database", QUICKLY, indirect=True)
def test_a_run_with_a_few_crashes_ends_like_one_without(tmp_path, undisturbed, database, outcomes):
    outcome = disturbed(
        tmp_path / "run", 0, SHORT_ROUNDS, SHORT_KILLS, undisturbed, database, deadline=float("inf")
    )
    outcomes.append(outcome)
    assert outcome.problems() == []
    assert outcome.kills.total() >= SHORT_KILLS


@pytest.mark.chaos
@pytest.mark.parametrize("database", DATABASES, indirect=True)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_with_many_crashes_ends_like_one_without(
    tmp_path, undisturbed, database, outcomes, seed, deadline
):
    outcome = disturbed(tmp_path / "run", seed, LONG_ROUNDS, LONG_KILLS, undisturbed, database, deadline)
    outcomes.append(outcome)
    assert outcome.problems() == []
