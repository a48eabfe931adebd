"""A server that sees is killed around the decoding and encoding of images, and ends like undisturbed."""

import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos import runs, tenants
from tests.chaos.attack import POINTS_OF_IMAGES, Attack
from tests.chaos.cluster import ROLES
from tests.chaos.postgres import Postgres
from tests.chaos.runs import Ended

ROUNDS = 60  # of each run
SEEDS = 1, 2
OPTIONS: dict[str, Any] = {"rounds": ROUNDS, "sees": True, "who": tenants.WITH_IMAGES}

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1300)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Ended]:
    root = tmp_path_factory.mktemp("undisturbed")
    return functools.cache(lambda seed: runs.undisturbed(root / str(seed), seed, **OPTIONS))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("database", ["SQLite", "PostgreSQL"], indirect=True)
def test_images_are_seen_with_the_same_bits_whoever_is_killed(
    tmp_path, undisturbed, outcomes, database, seed
):
    def strike(attack: Attack, database: Postgres | None = database) -> None:
        attack.kill_at_each(POINTS_OF_IMAGES)
        attack.kill_each(ROLES, 1, database and database.kill)

    outcome = runs.disturbed(tmp_path / "run", seed, undisturbed(seed), strike, database, **OPTIONS)
    outcomes.append(outcome)
    assert outcome.problems() == []
    assert [each for each in (*POINTS_OF_IMAGES, *ROLES) if not outcome.kills[each]] == []
