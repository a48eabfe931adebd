"""Replicas that sample what others train are killed, leave and join, and versions are torn on their way."""

import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import runs, tenants
from tests.chaos.attack import PUBLISHING_POINTS, Attack
from tests.chaos.cluster import ROLES, SAMPLERS, SAMPLERS_WORKERS
from tests.chaos.postgres import Postgres
from tests.chaos.runs import Ended
from tests.sdk.server import COMMAND

ROUNDS = 40  # of each run
SEEDS = 1, 2, 3
EVERYBODY = (*ROLES, *SAMPLERS, *SAMPLERS_WORKERS)
OPTIONS: dict[str, Any] = {"rounds": ROUNDS, "has_samplers": True, "who": tenants.WITH_SAMPLERS}

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1300)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Ended]:
    root = tmp_path_factory.mktemp("undisturbed")
    return functools.cache(lambda seed: runs.undisturbed(root / str(seed), seed, **OPTIONS))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("database", ["SQLite", "PostgreSQL"], indirect=True)
def test_all_ends_with_the_same_bits_whoever_is_killed(tmp_path, undisturbed, outcomes, database, seed):
    leavings = 0

    def strike(attack: Attack, database: Postgres | None = database) -> None:
        nonlocal leavings
        attack.kill_at_each(PUBLISHING_POINTS, SAMPLERS)
        attack.kill_each(EVERYBODY, 1, database and database.kill)
        leavings = attack.leavings

    outcome = runs.disturbed(tmp_path / "run", seed, undisturbed(seed), strike, database, **OPTIONS)
    outcomes.append(outcome)
    assert outcome.problems() == []
    wanted = (*PUBLISHING_POINTS, *EVERYBODY)
    assert [each for each in wanted if not outcome.kills[each]] == []
    assert leavings > len(PUBLISHING_POINTS) // 2
    assert versions_after_gc(tmp_path / "run" / "data", database) == []


def versions_after_gc(data_dir: Path, database: Postgres | None) -> list[Path]:
    """Delete what nobody needs any more, as a running server does later."""
    options = [] if database is None else ["--database-url", database.url]
    subprocess.run([COMMAND, "gc", "--data-dir", data_dir, *options], check=True, capture_output=True)
    return list((data_dir / "versions").iterdir())
