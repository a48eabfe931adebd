"""Runs clients on a cluster, with and without crashes, and compares what becomes of them."""

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.chaos import answers, tenants
from tests.chaos.answers import Answers, Program
from tests.chaos.attack import Attack
from tests.chaos.cluster import Cluster
from tests.chaos.outcome import Outcome
from tests.chaos.postgres import Postgres
from tests.chaos.tenants import Tenant

SNAPSHOT_SECONDS = 1
GOOD_EXITS = 0, -signal.SIGKILL  # the last kill may come when clients have all they wanted

Ended = tuple[Answers, Path]  # a run's answers, and its data


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


def undisturbed(folder: Path, seed: int, *, rounds: int, **options: Any) -> Ended:
    """Run a program without crashes."""
    with running(folder, seed, rounds, **options) as (cluster, program):
        result = program.answers(cluster.check)
        assert set(cluster.stop().values()) == {0}
    assert result.errors == []
    assert answers.miscounted_steps(result, cluster.data_dir) == []
    return result, cluster.data_dir


def disturbed(
    folder: Path,
    seed: int,
    expected: Ended,
    strike: Callable[[Attack], None],
    database: Postgres | None,
    *,
    rounds: int,
    deadline: float = float("inf"),
    **options: Any,
) -> Outcome:
    """Run the same program once more, this time with kills, and compare."""
    options |= {} if database is None else {"database_url": database.url}
    with running(folder, seed, rounds, **options) as (cluster, program):
        attack = Attack(cluster, program, seed, deadline)
        strike(attack)
        result = program.answers(cluster.check)
        exits = cluster.stop()
    return Outcome(
        database="SQLite" if database is None else "PostgreSQL",
        seed=seed,
        kills=attack.kills,
        cuts=attack.cuts,
        differences=answers.differences(expected[0], result)
        + answers.final_differences(*expected, result, cluster.data_dir),
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
