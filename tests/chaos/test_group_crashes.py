"""A student and its teacher, in groups of their own, are killed again and again, and end like undisturbed."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos import answers, tenants
from tests.chaos.answers import Answers
from tests.chaos.attack import Attack
from tests.chaos.cluster import AGENT, COORDINATOR, ROLES, TEACHERS_WORKER
from tests.chaos.outcome import Outcome, table
from tests.chaos.postgres import Postgres
from tests.chaos.test_crashes import GOOD_EXITS, running

ROUNDS, KILLS = 24, 2  # of each run; kills of each process
SEEDS = 1, 2
EVERYBODY = (*ROLES, TEACHERS_WORKER)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1300)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Answers, Path]]:
    root = tmp_path_factory.mktemp("undisturbed")

    @functools.cache
    def run(seed: int) -> tuple[Answers, Path]:
        options = {"has_teacher": True, "who": tenants.WITH_TEACHER}
        with running(root / str(seed), seed, ROUNDS, **options) as (cluster, program):
            result = program.answers(cluster.check)
            assert cluster.stop() == {COORDINATOR: 0, AGENT: 0}
        assert result.errors == []
        return result, cluster.data_dir

    return run


@pytest.fixture(scope="module")
def outcomes() -> Iterator[list[Outcome]]:
    found: list[Outcome] = []
    yield found
    print("\n" + table(found))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("database", ["SQLite", "PostgreSQL"])
def test_a_student_ends_with_the_same_bits_whoever_is_killed(tmp_path, undisturbed, outcomes, database, seed):
    expected, expected_data = undisturbed(seed)
    postgres = Postgres() if database == "PostgreSQL" else None
    options = {"has_teacher": True, "who": tenants.WITH_TEACHER}
    options |= {} if postgres is None else {"database_url": postgres.url}
    try:
        with running(tmp_path / "run", seed, ROUNDS, **options) as (cluster, program):
            attack = Attack(cluster, program, seed, deadline=float("inf"))
            attack.kill_each(EVERYBODY, KILLS, postgres and postgres.kill)
            result = program.answers(cluster.check)
            exits = cluster.stop()
    finally:
        if postgres is not None:
            postgres.close()
    outcome = Outcome(
        database=database,
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
        steps=result.count("step"),
    )
    outcomes.append(outcome)
    assert outcome.problems() == []
    assert {role: outcome.kills[role] >= KILLS for role in EVERYBODY} == dict.fromkeys(EVERYBODY, True)
    assert (result.count("scores"), result.count("samples")) == (ROUNDS, 2 * ROUNDS)
