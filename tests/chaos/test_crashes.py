"""A run that is interrupted by kills at any moment ends like an undisturbed one."""

import functools
import time
from collections.abc import Callable

import pytest

from tests.chaos import runs
from tests.chaos.runs import Ended

SHORT_ROUNDS, SHORT_KILLS = 2, 2  # of the short runs
LONG_ROUNDS, LONG_KILLS = 30, 27  # of every run of `make chaos`
LONG_SECONDS = 18 * 60  # after which it kills no more
SEEDS = 1, 2, 3, 4
DATABASES = "SQLite", "PostgreSQL"
QUICKLY = "SQLite", pytest.param("PostgreSQL", marks=pytest.mark.chaos)

Undisturbed = Callable[[int, int], Ended]

pytestmark = pytest.mark.timeout(1300)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return the undisturbed run of a seed: its answers, and its data."""
    root = tmp_path_factory.mktemp("undisturbed")
    return functools.cache(
        lambda seed, rounds: runs.undisturbed(root / f"{seed}-{rounds}", seed, rounds=rounds)
    )


@pytest.fixture(scope="module")
def deadline() -> float:
    return time.monotonic() + LONG_SECONDS


@pytest.mark.slow
@pytest.mark.parametrize("database", QUICKLY, indirect=True)
def test_a_run_with_a_few_crashes_ends_like_one_without(tmp_path, undisturbed, database, outcomes):
    expected = undisturbed(0, SHORT_ROUNDS)
    outcome = runs.disturbed(
        tmp_path / "run",
        0,
        expected,
        lambda attack: attack.run(SHORT_KILLS, database and database.kill),
        database,
        rounds=SHORT_ROUNDS,
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
    outcome = runs.disturbed(
        tmp_path / "run",
        seed,
        undisturbed(seed, LONG_ROUNDS),
        lambda attack: attack.run(LONG_KILLS, database and database.kill),
        database,
        rounds=LONG_ROUNDS,
        deadline=deadline,
    )
    outcomes.append(outcome)
    assert outcome.problems() == []
