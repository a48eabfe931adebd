"""A student and its teacher, in groups of their own, are killed again and again, and end like undisturbed."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos import runs, tenants
from tests.chaos.cluster import ROLES, TEACHERS_WORKER
from tests.chaos.runs import Ended

ROUNDS, KILLS = 24, 2  # of each run; kills of each process
SEEDS = 1, 2
EVERYBODY = (*ROLES, TEACHERS_WORKER)
OPTIONS: dict[str, Any] = {"rounds": ROUNDS, "has_teacher": True, "who": tenants.WITH_TEACHER}

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1300)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Ended]:
    root = tmp_path_factory.mktemp("undisturbed")
    return functools.cache(lambda seed: runs.undisturbed(root / str(seed), seed, **OPTIONS))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("database", ["SQLite", "PostgreSQL"], indirect=True)
def test_a_student_ends_with_the_same_bits_whoever_is_killed(tmp_path, undisturbed, outcomes, database, seed):
    expected = undisturbed(seed)
    outcome = runs.disturbed(
        tmp_path / "run",
        seed,
        expected,
        lambda attack: attack.kill_each(EVERYBODY, KILLS, database and database.kill),
        database,
        **OPTIONS,
    )
    outcomes.append(outcome)
    assert outcome.problems() == []
    assert {role: outcome.kills[role] >= KILLS for role in EVERYBODY} == dict.fromkeys(EVERYBODY, True)
    assert (expected[0].count("scores"), expected[0].count("samples")) == (ROUNDS, 2 * ROUNDS)
