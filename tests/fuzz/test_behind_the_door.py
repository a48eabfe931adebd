"""Odd requests behind the door, kill -9, restart: nothing falls, and a bystander sees nothing of it.

FUZZ_SEED repeats a run, FUZZ_STORIES=17,18 some of its stories; FUZZ_SECONDS bounds each of the long runs.
"""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.fuzz.alice import TOLERANCE, Note
from tests.fuzz.conftest import ROUNDS
from tests.fuzz.fuzzing import Result, Run, in_peace
from tests.fuzz.served import serving

SEED = int(os.environ.get("FUZZ_SEED", "1"))
SECONDS = int(os.environ.get("FUZZ_SECONDS", "300"))
ONLY = [int(number) for number in os.environ.get("FUZZ_STORIES", "").split(",") if number]
SHORT = range(12), range(12, 16), range(0)  # with each kind of request several times
LONG = 64  # stories between two kills

pytestmark = pytest.mark.timeout(3600)


def test_nothing_falls_by_odd_requests(
    database_url: str | None, model_dir: Path, peace: list[Note], tmp_path: Path
) -> None:
    with serving(tmp_path / "run", model_dir, database_url) as served:
        result = Run(served, tmp_path, SEED, ROUNDS).go([ONLY, []] if ONLY else SHORT)
    judge(result, peace)


@pytest.mark.fuzz
@pytest.mark.parametrize("real", [False, True], ids=["without JAX", "real workers"])
def test_nothing_falls_by_thousands_of_odd_requests(
    database_url: str | None, model_dir: Path, tmp_path: Path, real: bool
) -> None:
    with serving(tmp_path / "run", model_dir, database_url, real=real) as served:
        result = Run(served, tmp_path, SEED).go(parts(SECONDS, LONG))
    with serving(tmp_path / "peace", model_dir, None, real=real) as served:
        peace = in_peace(served, result.rounds)
    judge(result, peace)


def parts(seconds: float, stories: int) -> Iterator[Sequence[int]]:
    """So many stories at a time, until the time is over; then none, so that everything comes to its end."""
    deadline, first = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        yield range(first, first + stories)
        first += stories
    yield range(0)


def judge(result: Result, peace: list[Note], tolerance: float = TOLERANCE) -> None:
    print(f"\n{result}")
    problems = result.problems(peace, tolerance)
    if problems:
        pytest.fail("\n".join([str(result), *problems]), pytrace=False)
