"""Servers that see or speculate are killed around what only they do, and end like undisturbed plain ones."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.chaos import runs, tenants
from tests.chaos.attack import POINTS_OF_DRAFTS, POINTS_OF_IMAGES, Attack
from tests.chaos.cluster import EXPECTS, ROLES, SEES
from tests.chaos.postgres import Postgres
from tests.chaos.runs import Ended

SEEDS = 1, 2


@dataclass(frozen=True)
class Kind:
    """Says what a server does, and where it is killed."""

    points: Sequence[str]
    options: dict[str, Any]
    rounds: int = 60
    speculation: dict[str, Any] = field(default_factory=dict)  # which the undisturbed server does not do


KINDS = {
    "images": Kind(POINTS_OF_IMAGES, {"model": SEES, "who": tenants.WITH_IMAGES}),
    "drafts": Kind(POINTS_OF_DRAFTS, {"who": tenants.WITH_DRAFTS}, speculation={"speculation": "auto"}),
    "drafts of the model": Kind(
        POINTS_OF_DRAFTS,
        {"model": EXPECTS, "who": tenants.WITHOUT_TEXTS},
        rounds=30,
        speculation={"speculation": "mtp"},
    ),
}

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1300)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Ended]:
    root = tmp_path_factory.mktemp("undisturbed")
    return functools.cache(
        lambda kind, seed: runs.undisturbed(
            root / f"{kind}-{seed}", seed, rounds=KINDS[kind].rounds, **KINDS[kind].options
        )
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("database", ["SQLite", "PostgreSQL"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_have_the_same_bits_whoever_is_killed(tmp_path, undisturbed, outcomes, database, kind, seed):
    points, options = KINDS[kind].points, KINDS[kind].options | KINDS[kind].speculation

    def strike(attack: Attack, database: Postgres | None = database) -> None:
        attack.kill_at_each(points)
        attack.kill_each(ROLES, 1, database and database.kill)

    expected = undisturbed(kind, seed)
    rounds = KINDS[kind].rounds
    outcome = runs.disturbed(tmp_path / "run", seed, expected, strike, database, rounds=rounds, **options)
    outcomes.append(outcome)
    assert outcome.problems() == []
    assert [each for each in (*points, *ROLES) if not outcome.kills[each]] == []
