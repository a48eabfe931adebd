"""Odd requests behind the door, kill -9, restart: nothing falls, and a bystander sees nothing of it.

FUZZ_SEED repeats a run, FUZZ_STORIES=17,18 some of its stories; FUZZ_SECONDS bounds each of the long runs.
"""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.fuzz.alice import Note
from tests.fuzz.conftest import ROUNDS
from tests.fuzz.fuzzing import Result, Run, in_peace
from tests.fuzz.served import serving

SEED = int(os.environ.get("FUZZ_SEED", "1"))
SECONDS = int(os.environ.get("FUZZ_SECONDS", "300"))
ONLY = [int(number) for number in os.environ.get("FUZZ_STORIES", "").split(",") if number]
SHORT = range(24), range(24, 32), range(0)
LONG = 64  # stories between two kills

pytestmark = pytest.mark.timeout(3600)


def test_nothing_falls_by_odd_requests(
    database_url: str | None, model_dir: Path, peace: list[Note], tmp_path: Path
) -> None:
    with serving(tmp_path / "run", model_dir, database_url) as served:
        result = Run(served, tmp_path, SEED, ROUNDS).go([ONLY, []] if ONLY else SHORT)
    _judge(result, peace)


@pytest.mark.fuzz
@pytest.mark.parametrize("real", [False, True], ids=["without JAX", "real workers"])
def test_nothing_falls_by_thousands_of_odd_requests(
    database_url: str | None, model_dir: Path, tmp_path: Path, real: bool
) -> None:
    with serving(tmp_path / "run", model_dir, database_url, real=real) as served:
        result = Run(served, tmp_path, SEED).go(_parts())
    with serving(tmp_path / "peace", model_dir, None, real=real) as served:
        peace = in_peace(served, result.rounds)
    _judge(result, peace)


def _parts() -> Iterator[Sequence[int]]:
    """Until the time is over; then one without anything new."""
    deadline, first = time.monotonic() + SECONDS, 0
    while time.monotonic() < deadline:
        yield range(first, first + LONG)
        first += LONG
    yield range(0)


def _judge(result: Result, peace: list[Note]) -> None:
    print(f"\n{result}")
    problems = result.problems(peace)
    if problems:
        pytest.fail("\n".join([str(result), *problems]), pytrace=False)
